// The chat: a conversation that is sent as a whole with each turn, and eight prompts at once.

import { events, lateRefusal, ServerError } from "./api.js";
import { markdown } from "./markdown.js";
import { $, made } from "./nodes.js";
import { sampling, withSystem } from "./settings.js";

const CHAT = "pagoda-chat";
const MAX_KEPT = 200_000; // characters of a conversation that outlive a reload

// Beginnings of texts that differ in length, so that the sequences leave one after another.
const EIGHT = [
  "The capital of Sweden is",
  "The sky is blue because",
  "Three tips for learning a language:\n\n1.",
  "The difference between a river and a lake is that",
  "Pagodas have seldom fallen in an earthquake, because",
  "Here is a short poem about the sea:\n\n",
  "Here is how to bake bread, step by step:\n\n1.",
  "Once upon a time, an old keeper lived alone in a lighthouse.",
];

const OPTIONS = { stream: true, stream_options: { include_usage: true } };

let conversation = [];
let asking = null; // the AbortController of the turn that is being answered
const names = new Map(); // request ids of this page's calls, with what to call them in the batch

// What this page calls a request, if it has sent it.
export function nameOf(requestId) {
  return names.get(requestId);
}

function named(id, name) {
  names.set(id.replace(/^\w+-/, ""), name.split("\n")[0]);
  if (names.size > 200) names.delete(names.keys().next().value);
}

// resumable  whether the server keeps streams that can be resumed
export function startChat({ model, resumable, onUnauthenticated }) {
  const log = $("log");
  const message = $("message");
  const welcome = $("welcome");

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || asking) return;
    message.value = "";
    fit();
    ask(text);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  });
  message.addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) asking?.abort();
  });
  $("stop").addEventListener("click", () => asking?.abort());
  $("new-chat").addEventListener("click", () => {
    asking?.abort();
    conversation = [];
    keep();
    log.replaceChildren(welcome);
    $("new-chat").hidden = true;
    message.focus();
  });
  for (const button of document.querySelectorAll(".suggestions button")) {
    button.addEventListener("click", () => !asking && ask(button.textContent));
  }
  $("eight").addEventListener("click", startEight);
  restore();

  function fit() {
    message.rows = Math.min(6, message.value.split("\n").length + Math.floor(message.value.length / 60));
  }

  function add(node) {
    welcome.remove();
    $("new-chat").hidden = false;
    log.append(node);
    log.scrollTop = log.scrollHeight;
    return node;
  }

  // -- a turn -----------------------------------------------------------------------------------------------------

  async function ask(text) {
    if (conversation.at(-1)?.role === "user") conversation.pop(); // it had no answer
    conversation.push({ role: "user", content: text });
    keep();
    for (const button of log.querySelectorAll(".trouble button")) button.remove(); // of an earlier question
    addQuestion(text);
    await answer(text);
  }

  function addQuestion(text) {
    add(made("article", "turn user", made("h3", "unseen", "You"), made("p", "text", text)));
  }

  // An empty turn of the model's, and a button that copies what `content` then returns.
  function addAnswer(content) {
    const [words, stats] = [made("div", "text"), made("p", "stats")];
    const copy = made("button", "quiet", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => copyText(content(), copy));
    return { turn: add(made("article", "turn", made("h3", "unseen", "Answer"), words, stats)), words, stats, copy };
  }

  // Show the conversation that the tab has kept.
  function restore() {
    conversation = keptChat();
    for (const { role, content } of conversation) {
      if (role === "user") addQuestion(content);
      else {
        const { words, stats, copy } = addAnswer(() => content);
        show(words, content, log);
        stats.append(copy);
      }
    }
    const last = conversation.at(-1);
    if (last?.role === "user") complain("This has no answer yet.", again(last.content));
    log.scrollTop = log.scrollHeight;
  }

  async function answer(question) {
    const { turn, words, stats, copy } = addAnswer(() => content);
    turn.setAttribute("aria-busy", "true");
    asking = new AbortController();
    const controller = asking;
    busy(true);
    announce("Answering.");
    const messages = conversation;
    let content = "";
    let end = "";
    const clock = meter();
    const paint = () => show(words, content, log);
    try {
      const asked = { ...OPTIONS, resumable: resumable(), ...sampling() };
      const body = { ...asked, model: model(), messages: withSystem(messages) };
      for await (const { data } of events("/v1/chat/completions", { body, signal: controller.signal })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw lateRefusal(chunk.error);
        if (chunk.id) named(chunk.id, question);
        const [choice] = chunk.choices ?? [];
        if (choice?.delta?.content) {
          clock.token();
          content += choice.delta.content;
          later(paint);
        }
        end = choice?.finish_reason ?? end;
        if (chunk.usage) clock.tokens = chunk.usage.completion_tokens;
        stats.textContent = clock.text();
      }
      messages.push({ role: "assistant", content });
      announce(content || "The answer is empty.");
      if (end === "length") stats.textContent += " · ended at the limit of tokens";
    } catch (error) {
      if (error.name === "AbortError") {
        if (content) messages.push({ role: "assistant", content });
        stats.textContent = `${clock.text()} · stopped`.replace(/^ · /, "");
        announce("Stopped.");
      } else {
        if (!content) turn.remove();
        complain(inWords(error), again(question));
        if (error.status === 401) onUnauthenticated();
      }
    } finally {
      keep();
      turn.removeAttribute("aria-busy");
      if (content) {
        paint();
        stats.append(copy);
      }
      if (asking === controller) asking = null;
      busy(false);
    }
  }

  // A button that asks the last question again, and takes the note away that it stands in.
  function again(question) {
    const button = made("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", () => {
      if (asking) return;
      button.parentElement.remove();
      answer(question);
    });
    return button;
  }

  function complain(words, ...buttons) {
    const note = made("div", "trouble", made("p", "", words), ...buttons);
    note.setAttribute("role", "alert");
    add(note);
  }

  function busy(is) {
    $("stop").hidden = !is;
    $("send").hidden = is;
    if (is && document.activeElement === $("send")) $("stop").focus();
    if (!is && document.activeElement === document.body) message.focus();
  }

  function announce(text) {
    $("announcer").textContent = text;
  }

  // -- eight prompts ----------------------------------------------------------------------------------------------

  // One completion with eight prompts: browsers open at most six connections to a server.
  async function startEight() {
    const button = $("eight");
    if (button.ariaDisabled === "true") return;
    button.ariaDisabled = "true"; // it stays in focus
    const start = performance.now();
    const list = made("ol", "eight");
    const parts = EIGHT.map((beginning) => {
      const count = made("span", "count", "waiting");
      const text = made("div", "text");
      const tail = made("span", "tail");
      const name = made("span", "question", beginning.split("\n")[0]);
      list.append(made("li", "", made("details", "", made("summary", "", name, count, tail), text)));
      const part = { content: beginning, first: 0 };
      part.paint = () => {
        const ttft = `TTFT ${(part.first - start).toFixed(0)} ms`;
        text.replaceChildren(markdown(part.content), made("p", "fine", ttft));
        tail.textContent = part.content.slice(-160).replace(/\s+/g, " ");
        const words = part.content.trim().split(/\s+/).length;
        count.textContent = `${words} ${words === 1 ? "word" : "words"}`;
      };
      part.fail = (words) => {
        count.textContent = part.first ? "lost" : "refused";
        text.textContent = tail.textContent = words;
      };
      return part;
    });
    add(made("article", "turn", made("h3", "", "Eight prompts at once"), list));
    announce("Eight prompts were started.");
    const body = { model: model(), prompt: EIGHT, stream: true, max_tokens: 400, repetition_penalty: 1.1, seed: 2 };
    try {
      for await (const { data } of events("/v1/completions", { body })) {
        if (data === "[DONE]") break;
        const { id, choices, error } = JSON.parse(data);
        if (error) throw lateRefusal(error);
        for (const { index, text } of choices) {
          const part = parts[index];
          if (!part.first) named(index ? `${id}-${index}` : id, EIGHT[index]);
          part.first ||= performance.now();
          part.content += text;
          later(part.paint);
        }
      }
      announce("The eight prompts are answered.");
    } catch (error) {
      for (const part of parts) part.fail(inWords(error));
      complain(inWords(error));
      if (error.status === 401) onUnauthenticated();
    } finally {
      button.ariaDisabled = "false";
    }
  }
}

// -- what outlives a reload -------------------------------------------------------------------------------------------

// Keep the conversation in this tab: its last turns, if it is long.
function keep() {
  let from = 0;
  let size = conversation.reduce((sum, { content }) => sum + content.length, 0);
  while (size > MAX_KEPT || (from && conversation[from]?.role === "assistant")) {
    size -= conversation[from].content.length;
    from += 1;
  }
  try {
    sessionStorage.setItem(CHAT, JSON.stringify(conversation.slice(from)));
  } catch {
    // The browser keeps no more: the chat lasts until the next reload.
  }
}

function keptChat() {
  try {
    return JSON.parse(sessionStorage.getItem(CHAT)) ?? [];
  } catch {
    return [];
  }
}

// -- pieces -----------------------------------------------------------------------------------------------------------

// Counts tokens and times of an answer, as this page sees them.
function meter() {
  const start = performance.now();
  let first = 0;
  let last = 0;
  return {
    tokens: 0,
    token() {
      last = performance.now();
      first ||= last;
      this.tokens += 1;
    },
    text() {
      if (!first) return "";
      const words = [`${this.tokens} ${this.tokens === 1 ? "token" : "tokens"}`];
      if (last > first) words.push(`${((1e3 * (this.tokens - 1)) / (last - first)).toFixed(0)} tokens/s`);
      words.push(`TTFT ${(first - start).toFixed(0)} ms`);
      return words.join(" · ");
    },
  };
}

const waiting = new Set();

// Do this with the next picture, once however often it is asked for by then.
function later(work) {
  if (!waiting.size) {
    requestAnimationFrame(() => {
      const works = [...waiting];
      waiting.clear();
      for (const each of works) each();
    });
  }
  waiting.add(work);
}

function show(node, content, log) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  node.replaceChildren(markdown(content));
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function inWords(error) {
  if (error instanceof ServerError) return error.message;
  console.error(error);
  return "Something in this page failed. Reload it.";
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser refused to copy";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
