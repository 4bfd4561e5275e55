// What the scripts of coding agents share: a home of their own, one turn of one, and what all must do
// with a model that a script plays (see scripted.jinja).

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { PATIENCE_MS, check } from "./harness.mjs";

export const SCRIPTED_URL = process.env.CLIENTS_SCRIPTED_URL;
export const SCRIPTED_KEY = process.env.CLIENTS_SCRIPTED_KEY;
export const SCRIPTED_MODEL = "scripted";
export const CANNOT_SEE = "Here was one image that cannot be shown";
const PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";

export const packages = fileURLToPath(new URL("../node_modules", import.meta.url));

// A directory that is the agent's home and that it works in, with a picture.
export function newHome() {
  const home = mkdtempSync(join(tmpdir(), "forebay-agent-"));
  process.on("exit", () => rmSync(home, { recursive: true, force: true }));
  writeFileSync(join(home, "pixel.png"), Buffer.from(PIXEL, "base64"));
  return home;
}

// Runs an agent to its end: its exit status and all that it said.
export function turn(command, args, home, variables) {
  const env = { PATH: process.env.PATH, HOME: home, ...variables };
  const options = { cwd: home, env, stdio: ["ignore", "pipe", "pipe"], timeout: PATIENCE_MS };
  return new Promise((resolve, reject) => {
    const agent = spawn(command, args, options);
    let out = "";
    let err = "";
    agent.stdout.on("data", (data) => (out += data));
    agent.stderr.on("data", (data) => (err += data));
    agent.on("error", reject);
    agent.on("close", (status) => resolve({ status, out: out.trim(), all: out + err }));
  });
}

// The scenarios of an agent: `ask(prompt, options)` is a turn of it, whose options are `home`,
// `model`, `url`, `key` and `goesOn`; `shell` and `look` are calls of its tools.
export function scenarios({ ask, shell, look, noModel, noRoom }) {
  return {
    async says() {
      const { status, out, all } = await ask("SAY one");
      check(status === 0 && out === "I heard one.", all);
    },

    async works() {
      const calls = [shell("echo fore''bay"), shell("cat none.txt")];
      const { status, out, all } = await ask(calls.join("\n"));
      check(status === 0 && all.includes("The last one gave: "), all);
      check(out.includes("none.txt"), all);
      const first = await ask(calls[0]);
      check(first.out.includes("forebay"), first.all);
    },

    async is_shown_a_picture() {
      const home = newHome();
      const { status, out, all } = await ask(look(join(home, "pixel.png")), { home });
      check(status === 0 && out.includes(CANNOT_SEE), all);
      const after = await ask("SAY it", { home, goesOn: true });
      check(after.status === 0, after.all);
    },

    async goes_on() {
      const home = newHome();
      await ask("SAY one", { home });
      const { status, out, all } = await ask("SAY two", { home, goesOn: true });
      check(status === 0 && out === "I heard one, then two.", all);
    },

    async errors() {
      const unknown = await ask("SAY one", { model: "none" });
      check(unknown.status !== 0 && noModel.test(unknown.all), unknown.all);
      const full = await ask("SAY one", {
        url: process.env.CLIENTS_URL,
        key: process.env.CLIENTS_KEY,
        model: process.env.CLIENTS_MODEL,
      });
      check(full.status !== 0 && noRoom.test(full.all), full.all);
    },
  };
}
