package planner

import (
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/model"
)

// gpt2Vocab is the vocabulary size of GPT-2's tokenizer.
const gpt2Vocab = 50257

// ModelTokenizer returns the tokenizer that a model was made for: the file beside its config.json
// or its weights, gpt2 for the presets with GPT-2's vocabulary, bytes for a vocabulary of the 256
// bytes and at most 8 more tokens; "" if it is not known. m is the open model of Config.Model, or
// nil.
func ModelTokenizer(cfg *config.Config, m *Model, vocab int) string {
	folders, isFolder := []string{cfg.Model, cfg.Init}, m.Saved() != nil
	if isFolder && m.has(TokenizerFile) {
		return m.tokenizer()
	}
	if isFolder {
		folders = nil
	}
	for _, dir := range folders {
		if st, err := os.Stat(filepath.Join(dir, model.ConfigFile)); err != nil || !st.Mode().IsRegular() {
			continue
		}
		isFolder = isFolder || dir == cfg.Model
		if st, err := os.Stat(filepath.Join(dir, TokenizerFile)); err == nil && st.Mode().IsRegular() {
			return filepath.Join(dir, TokenizerFile)
		}
	}
	switch {
	case vocab >= 256 && vocab <= 264:
		return "bytes"
	case vocab == gpt2Vocab && !isFolder:
		return "gpt2"
	}
	return ""
}
