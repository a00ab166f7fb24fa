// Starts the page: its theme, its token, the chat and the live view.

import { keepToken, token } from "./api.js";
import { startChat } from "./chat.js";
import { readColours, startLive } from "./live.js";

const $ = (id) => document.getElementById(id);
const THEME = "pagoda-theme";
const isDark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  const dark = chosen ? chosen === "dark" : isDark.matches;
  $("theme-button").setAttribute("aria-pressed", String(dark));
  readColours();
}

$("theme-button").addEventListener("click", () => {
  localStorage.setItem(THEME, $("theme-button").getAttribute("aria-pressed") === "true" ? "light" : "dark");
  showTheme();
});
isDark.addEventListener("change", showTheme);
showTheme();

let model = "";
const dialog = $("token-dialog");

$("token-button").hidden = !token(); // until the server asks for one

function askForToken() {
  $("token-button").hidden = false;
  if (dialog.open) return;
  $("token").value = token();
  dialog.showModal();
}

$("token-button").addEventListener("click", askForToken);
$("token-cancel").addEventListener("click", () => dialog.close());
dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  dialog.close();
  live.restart();
});

startChat({ model: () => model || undefined, onUnauthenticated: askForToken });
const live = startLive({
  hello(told) {
    $("state").textContent = told ? (told.tenant ? `serving ${told.tenant}` : "serving") : "not connected";
    $("state").classList.toggle("is-serving", Boolean(told));
    if (!told) return;
    model = told.model;
    $("model").textContent = told.model;
    document.title = `${told.model} · Pagoda`;
  },
  onUnauthenticated: askForToken,
});
