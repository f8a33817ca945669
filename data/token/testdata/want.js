// Writes tokens.json: what Hugging Face's tokenizers makes of texts.json with
// each tokenizer here. Run in this folder after `npm install tokenizers@0.23.2`
// (anywhere that node finds it): node want.js
const fs = require('fs');
const { Tokenizer } = require('tokenizers');
(async () => {
  const texts = JSON.parse(fs.readFileSync('texts.json'));
  const out = {};
  for (const file of fs.readdirSync('.').filter(f => /^tokenizer-.*\.json$/.test(f)).sort()) {
    const t = Tokenizer.fromFile(file);
    out[file] = [];
    for (const text of texts) out[file].push((await t.encode(text, null, { addSpecialTokens: false })).getIds());
  }
  fs.writeFileSync('tokens.json', JSON.stringify(out).replaceAll(']],', ']],\n') + '\n');
})();
