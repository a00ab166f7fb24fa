/** Assigns values to message fields; a value that does not fit throws InvalidArgument with the field's path. */
import type { DescField, DescMessage, JsonObject, Message, MessageShape } from "@bufbuild/protobuf";
import { create, fromJson } from "@bufbuild/protobuf";
import { isFieldError, reflect, type ReflectMessage } from "@bufbuild/protobuf/reflect";
import { StructSchema } from "@bufbuild/protobuf/wkt";
import { invalid } from "./errors.js";

/** Sets the field at a path such as `sampling.top_k`. `called` is the path as the caller knows it, if that differs. */
export function assign(schema: DescMessage, message: Message, path: string, value: unknown, called = path): void {
  const names = path.split(".");
  let parent = reflect(schema, message as MessageShape<DescMessage>);
  for (const name of names.slice(0, -1)) parent = childOf(parent, name);
  const field = fieldOf(parent, names.at(-1) as string);
  if (typeof value === "string" && !isWellFormed(value)) throw invalid(called, "is not text: it has half a character");
  try {
    setField(parent, field, value);
  } catch (error) {
    if (isFieldError(error) || error instanceof TypeError) throw invalid(called, error.message);
    throw error;
  }
}

/** Checks that a value is an object of texts, numbers, booleans, null, lists and objects. Throws InvalidArgument. */
export function jsonObject(value: unknown, field: string): JsonObject {
  try {
    fromJson(StructSchema, value as JsonObject);
  } catch (error) {
    throw invalid(field, `cannot be JSON: ${(error as Error).message}`);
  }
  return value as JsonObject;
}

function setField(parent: ReflectMessage, field: DescField, value: unknown): void {
  if (field.fieldKind === "list") {
    const list = parent.get(field);
    for (const each of typeof value === "string" ? [value] : (value as Iterable<never>)) list.add(each);
  } else if (field.fieldKind === "map") {
    const map = parent.get(field);
    for (const [key, each] of Object.entries(value as object)) map.set(numberIfPossible(key) as never, each as never);
  } else {
    parent.set(field, value as never);
  }
}

function childOf(parent: ReflectMessage, name: string): ReflectMessage {
  const field = fieldOf(parent, name);
  if (field.fieldKind !== "message") throw new TypeError(`${field.toString()} is no message`);
  if (!parent.isSet(field)) parent.set(field, reflect(field.message, create(field.message)));
  return parent.get(field);
}

function fieldOf(parent: ReflectMessage, name: string): DescField {
  const field = parent.desc.fields.find((each) => each.name === name);
  if (field === undefined) throw new TypeError(`${parent.desc.typeName} has no field ${name}`);
  return field;
}

/** Objects have texts as keys; the keys of the protocol's maps are numbers. */
function numberIfPossible(key: string): number | string {
  return /^-?\d+$/.test(key) ? Number(key) : key;
}

/** Whether no half of a character stands alone: UTF-8 has no bytes for it. */
function isWellFormed(text: string): boolean {
  return !/\p{Surrogate}/u.test(text);
}
