// What the chat asks for besides its messages. It stays in the tab. A field that is empty is not sent, so the server's
// default applies.

import { $ } from "./nodes.js";

const SETTINGS = "pagoda-settings";

const fields = () => [...document.querySelectorAll("#settings [name]")];
const changed = () => fields().filter((field) => field.value !== "");

export function startSettings() {
  const button = $("settings-button");
  const kept = keptSettings();
  for (const field of fields()) field.value = kept[field.name] ?? "";
  button.addEventListener("click", () => {
    const isOpen = $("settings").hidden;
    const log = $("log");
    const bottom = log.scrollTop + log.clientHeight;
    $("settings").hidden = !isOpen;
    log.scrollTop = bottom - log.clientHeight; // the last lines stay in sight
    button.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) $("system").focus();
  });
  $("settings").addEventListener("input", keep);
  showCount();
}

// The messages of a request, with the system message in front.
export function withSystem(messages) {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }, ...messages] : messages;
}

// Temperature and the like, by the names of the API.
export function sampling() {
  const chosen = fields().filter((field) => field.type === "number" && field.value !== "");
  return Object.fromEntries(chosen.map((field) => [field.name, Number(field.value)]));
}

function keep() {
  showCount();
  try {
    const values = changed().map((field) => [field.name, field.value]);
    sessionStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
  } catch {
    // The browser keeps no more: they last until the next reload.
  }
}

function keptSettings() {
  try {
    return JSON.parse(sessionStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

function showCount() {
  const count = changed().length;
  $("settings-button").textContent = count ? `Settings (${count})` : "Settings";
}
