// Answers one question: the page makes a worker for each, and ends it for the next.
"use strict";
importScripts("wasm_exec.js" + location.search);
onmessage = async ({data: {module, line, form}}) => {
  let text = "", answered = false;
  const post = postMessage.bind(self);
  self.postMessage = m => { answered ||= m.kind == "answer"; post(m); };
  const decoder = new TextDecoder();
  globalThis.fs.writeSync = (fd, bytes) => { text += decoder.decode(bytes); return bytes.length; };
  try {
    const go = new Go();
    go.argv = ["spillway", line, form];
    await go.run(await WebAssembly.instantiate(module, go.importObject));
  } catch (e) {
    text += e;
  }
  if (!answered) post({kind: "answer", status: 3, stdout: "", stderr: "spillway: the planner stopped: " + text, page: ""});
};
