// Starts the page: its theme, its token, the chat and the live view.

import { keepToken, token } from "./api.js";
import { startChat } from "./chat.js";
import { readColours, startLive } from "./live.js";
import { $ } from "./nodes.js";
import { startSettings } from "./settings.js";

const THEME = "pagoda-theme";
const isDark = matchMedia("(prefers-color-scheme: dark)");
let other = "dark"; // the theme that the button switches to

function showTheme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  other = (chosen ?? (isDark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  $("theme-button").textContent = other === "dark" ? "Dark theme" : "Light theme";
  readColours();
}

$("theme-button").addEventListener("click", () => {
  localStorage.setItem(THEME, other);
  showTheme();
});
isDark.addEventListener("change", showTheme);
showTheme();

let model = "";
const dialog = $("token-dialog");

$("token-button").hidden = !token(); // until the server asks for one

// `isRefused`: the server did not take the tab's token.
function askForToken(isRefused) {
  $("token-button").hidden = false;
  if (dialog.open) return;
  $("token-refused").hidden = !isRefused;
  $("token").setAttribute("aria-invalid", String(isRefused));
  $("token").value = token();
  dialog.showModal();
  $("token").select();
}

const onUnauthenticated = () => askForToken(token() !== "");

$("token-button").addEventListener("click", () => askForToken(false));
$("token-cancel").addEventListener("click", () => dialog.close());
dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  dialog.close();
  live.restart();
});

function showState(text, isServing = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("is-serving", isServing);
}

// The name of the only model, or a choice among several. A choice that is still served stays.
function showModels(names) {
  const choice = $("model-choice");
  model = names.includes(model) ? model : names[0];
  choice.replaceChildren(...names.map((name) => new Option(name, name, false, name === model)));
  choice.hidden = names.length === 1;
  $("model").hidden = !choice.hidden;
  $("model").textContent = model;
  document.title = `${model} · Pagoda`;
}

$("model-choice").addEventListener("change", (event) => {
  model = event.target.value;
  document.title = `${model} · Pagoda`;
});

let tenant = "";
let resumable = false;

startSettings();
startChat({ model: () => model || undefined, resumable: () => resumable, onUnauthenticated });
const live = startLive({
  hello(server) {
    showState(server ? "connected" : "not connected");
    if (!server) return;
    ({ tenant, resumable } = server);
    showModels(server.models);
  },
  onEngines(ready) {
    showState(!ready ? "no engine is ready" : tenant ? `serving ${tenant}` : "serving", ready > 0);
  },
  onUnauthenticated,
});
