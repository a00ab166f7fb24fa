/** The servers of the test vectors, for as long as a test file runs. */
import { type ChildProcess, spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import type { ClientOptions } from "pagoda-client";

export const ROOT = fileURLToPath(new URL("../../../../", import.meta.url));

/** How to connect to a server of tests/vectors. */
export interface Connection {
  address: string;
  token?: string;
  ca?: string;
}

let child: ChildProcess;

/** Starts the servers with $PAGODA_PYTHON, or the Python that `make` installs. */
export async function start(): Promise<Record<string, Connection>> {
  const made = `${ROOT}.venv/bin/python`;
  const python = process.env["PAGODA_PYTHON"] ?? (existsSync(made) ? made : "python3");
  child = spawn(python, ["-m", "tests.vectors"], { cwd: ROOT, stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise<never>((_, reject) => {
    child.once("exit", () => reject(new Error("the servers have ended")));
  });
  ended.catch(() => {});
  const line = new Promise<string>((resolve) => {
    if (child.stdout !== null) createInterface(child.stdout).once("line", resolve);
  });
  return JSON.parse(await Promise.race([line, ended])) as Record<string, Connection>;
}

/** Ends them. */
export async function stop(): Promise<void> {
  const ended = new Promise((resolve) => child.once("exit", resolve));
  child.stdin?.end();
  await ended;
}

/** The options of a client of this server. */
export function optionsFor({ token, ca }: Connection): ClientOptions {
  return { token, tls: ca ?? false };
}
