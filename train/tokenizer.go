package train

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/planner"
)

// openTokenizer opens the run's tokenizer, which must be one that the model can
// have been made for; nil where neither text is read nor one was named.
func openTokenizer(c *config.Config, m *planner.Model, vocab int) (data.Tokenizer, error) {
	if c.Tokenizer == "" {
		if !c.ReadsText() {
			return nil, nil
		}
		return nil, config.Refuse("Config.Tokenizer is missing: model %s has a vocabulary of %d tokens and no %s beside its config.json; give the one that it was made with (bytes, gpt2 or a %s)", c.ModelName(), vocab, planner.TokenizerFile, planner.TokenizerFile)
	}
	tok, err := m.OpenTokenizer(c.Tokenizer)
	if err != nil {
		return nil, fmt.Errorf("Config.Tokenizer: %w", err)
	}
	why := ""
	switch n := tok.VocabSize(); {
	case n > vocab:
		why = "more than"
	case 2*n < vocab:
		why = "under half of"
	}
	if why != "" {
		text := fmt.Sprintf("Config.Tokenizer %s has %d tokens, %s the %d of model %s", c.Tokenizer, tok.VocabSize(), why, vocab, c.ModelName())
		if own := planner.ModelTokenizer(c, m, vocab); own != "" && own != c.Tokenizer {
			return nil, fmt.Errorf("%s; leave it out for the model's own, %s", text, own)
		}
		return nil, errors.New(text + "; give the one that the model was made with")
	}
	return tok, nil
}

// ContextFor is the Seq of a run that continues a prompt by n tokens with an open model: as
// many as there will be, up to the model's positions.
func ContextFor(cfg config.Config, m *planner.Model, prompt string, n int) (int, error) {
	h, err := m.Config()
	if err != nil {
		return 0, err
	}
	if cfg.Tokenizer == "" {
		cfg.Tokenizer = planner.ModelTokenizer(&cfg, m, h.Vocab)
	}
	tok, err := openTokenizer(&cfg, m, h.Vocab)
	if err != nil {
		return 0, err
	}
	return max(1, min(h.Positions, len(data.Prompt(tok, prompt))+n)), nil
}
