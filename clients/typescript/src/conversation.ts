/** Converts a conversation of plain objects to the protocol's Chat. */
import { create, type Message } from "@bufbuild/protobuf";
import type { GenMessage } from "@bufbuild/protobuf/codegenv2";
import { invalid } from "./errors.js";
import { assign, jsonObject } from "./fields.js";
import * as pb from "./protos.js";

/** A message in OpenAI's format. An assistant's may have `tool_calls` and `reasoning`, a tool's `tool_call_id`. */
export interface ChatMessage {
  role: "system" | "user" | "assistant" | "tool";
  content?: string | readonly { type: "text"; text: string }[] | null;
  reasoning?: string | null;
  tool_calls?: readonly ToolCall[] | null;
  tool_call_id?: string | null;
  name?: string | null;
}

/** A call that the assistant made; `arguments` is an object or its JSON text. */
export type ToolCall = { id?: string } & (Call | { type?: "function"; function: Call });
interface Call {
  name: string;
  arguments?: string | object;
}

/** A function that the model may call; `parameters` is a JSON Schema or its text. */
export type Tool = Described | { type?: "function"; function: Described };
interface Described {
  name: string;
  description?: string;
  parameters?: string | object;
}

/** A mode, or the tool to call. */
export type ToolChoice = keyof typeof MODES | { name: string } | { type?: "function"; function: { name: string } };

export interface ChatOptions {
  /** Continue the last message, which must be the assistant's. */
  continueLast?: boolean | undefined;
  /** Functions that the model may call. */
  tools?: readonly Tool[] | undefined;
  toolChoice?: ToolChoice | undefined;
  /** Variables of the model's chat template, such as enable_thinking. */
  templateKwargs?: Readonly<Record<string, unknown>> | undefined;
}

const ROLES = {
  system: pb.Role.SYSTEM,
  user: pb.Role.USER,
  assistant: pb.Role.ASSISTANT,
  tool: pb.Role.TOOL,
};
const MODES = {
  auto: pb.ToolChoiceMode.AUTO,
  none: pb.ToolChoiceMode.NONE,
  required: pb.ToolChoiceMode.REQUIRED,
};
const MESSAGE_KEYS = ["role", "content", "reasoning", "tool_calls", "tool_call_id", "name"];

/** Converts a conversation; a text is one user message. Throws InvalidArgument. */
export function chatFrom(messages: string | readonly ChatMessage[], options: ChatOptions): pb.Chat {
  const conversation = typeof messages === "string" ? [{ role: "user", content: messages }] : messages;
  const chat = create(pb.ChatSchema, {
    continueLast: options.continueLast ?? false,
    messages: listAt(conversation, "chat.messages", messageFrom),
    tools: listAt(options.tools ?? [], "chat.tools", toolFrom),
  });
  if (options.toolChoice != null) chat.toolChoice = choiceFrom(options.toolChoice);
  if (options.templateKwargs != null) chat.templateKwargs = jsonObject(options.templateKwargs, "chat.template_kwargs");
  return chat;
}

function messageFrom(given: unknown, field: string): pb.ChatMessage {
  const message = objectAt(given, field);
  const unknown = Object.keys(message).find((key) => !MESSAGE_KEYS.includes(key) && message[key] != null);
  if (unknown !== undefined) {
    throw invalid(field, `has the unknown key ${unknown}; known: ${MESSAGE_KEYS.join(", ")}`);
  }
  const made = create(pb.ChatMessageSchema, { role: oneOf(ROLES, message["role"], `${field}.role`) });
  const { content, tool_calls: calls } = message;
  if (Array.isArray(content)) made.parts = listAt(content, `${field}.content`, partFrom);
  else if (content != null) assign(pb.ChatMessageSchema, made, "content", content, `${field}.content`);
  else if (calls == null) throw invalid(`${field}.content`, "is missing");
  assignAll(pb.ChatMessageSchema, made, message, ["reasoning", "tool_call_id", "name"], field);
  if (calls != null) made.toolCalls = listAt(calls, `${field}.tool_calls`, toolCallFrom);
  return made;
}

function partFrom(given: unknown, field: string): pb.ContentPart {
  const { type, text } = objectAt(given, field);
  if (type !== "text") throw invalid(field, `is of type ${String(type)}; the only type of part is text`);
  const made = create(pb.ContentPartSchema);
  assign(pb.ContentPartSchema, made, "text", text, `${field}.text`);
  return made;
}

function toolFrom(given: unknown, field: string): pb.Tool {
  const made = create(pb.ToolSchema);
  const described = functionOf(objectAt(given, field), field);
  assignAll(pb.ToolSchema, made, described, ["name", "description"], field);
  if (described["parameters"] != null) made.parameters = jsonFrom(described["parameters"], `${field}.parameters`);
  return made;
}

function toolCallFrom(given: unknown, field: string): pb.ToolCall {
  const made = create(pb.ToolCallSchema);
  const call = objectAt(given, field);
  const called = functionOf(call, field);
  assignAll(pb.ToolCallSchema, made, { id: call["id"], name: called["name"] }, ["id", "name"], field);
  if (called["arguments"] != null) made.arguments = jsonFrom(called["arguments"], `${field}.arguments`);
  return made;
}

function choiceFrom(given: ToolChoice): pb.ToolChoice {
  const field = "chat.tool_choice";
  const made = create(pb.ToolChoiceSchema);
  if (typeof given === "string") made.choice = { case: "mode", value: oneOf(MODES, given, field) };
  else assign(pb.ToolChoiceSchema, made, "tool", functionOf(objectAt(given, field), field)["name"], `${field}.name`);
  return made;
}

/** The object under `function`, as in OpenAI's format, or the object itself. */
function functionOf(value: Record<string, unknown>, field: string): Record<string, unknown> {
  return "function" in value ? objectAt(value["function"], `${field}.function`) : value;
}

/** Converts a value to JSON text; a text already is JSON text. */
function jsonFrom(value: unknown, field: string): string {
  if (typeof value === "string") return value;
  try {
    return JSON.stringify(value);
  } catch (error) {
    throw invalid(field, `cannot be JSON: ${(error as Error).message}`);
  }
}

function assignAll<T extends Message>(
  schema: GenMessage<T>,
  message: T,
  values: Record<string, unknown>,
  names: readonly string[],
  field: string,
): void {
  for (const name of names) {
    if (values[name] != null) assign(schema, message, name, values[name], `${field}.${name}`);
  }
}

function oneOf<T>(known: Record<string, T>, name: unknown, field: string): T {
  if (name == null) throw invalid(field, "is missing");
  const found = Object.hasOwn(known, String(name)) ? known[String(name)] : undefined;
  if (found === undefined) throw invalid(field, `${String(name)} is none of ${Object.keys(known).join(", ")}`);
  return found;
}

function listAt<T>(values: unknown, field: string, convert: (value: unknown, field: string) => T): T[] {
  if (!Array.isArray(values)) throw invalid(field, "must be a list");
  return values.map((value, at) => convert(value, `${field}[${at}]`));
}

function objectAt(value: unknown, field: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null) throw invalid(field, "must be an object");
  return value as Record<string, unknown>;
}
