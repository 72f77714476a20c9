// Runs the corpus under the CPython of npm's `pyodide` package (314.x is Python 3.14, 315.x is 3.15).
//
//     npm install --prefix DIRECTORY pyodide@314.0.7      # or pyodide@315.0.0-alpha.2, tried: Python 3.15.0rc1
//     node tests/interpreter/pyodide_run.mjs DIRECTORY [word ...]
//
// The exit status is that of tests/interpreter/corpus_runner.py.
import { createRequire } from "node:module";
import path from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const [directory, ...words] = process.argv.slice(2);
if (!directory) {
  console.error("usage: node pyodide_run.mjs DIRECTORY_WITH_PYODIDE [word ...]");
  process.exit(2);
}
const require = createRequire(path.resolve(directory, "package.json"));
const { loadPyodide } = await import(pathToFileURL(require.resolve("pyodide/pyodide.mjs")));
const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../..");
const python = await loadPyodide();
python.mountNodeFS("/repository", root);
const status = python.runPython(`
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/repository")
from tests.interpreter import corpus_runner
corpus_runner.main(${JSON.stringify(words)})
`);
process.exit(status);
