package train

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/planner"
)

// openTokenizer opens the run's tokenizer, and checks that the model's vocabulary fits it. It
// returns nil if the run reads no text and none was named.
func openTokenizer(c *config.Config, m *planner.Model, vocab int) (token.Tokenizer, error) {
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

// Prompts converts prompts to tokens for an open model.
type Prompts struct {
	Tokenizer token.Tokenizer
	Name      string       // Config.Tokenizer with which it was opened
	Dialog    *data.Dialog // nil: prompts are plain text, not messages
	Positions int          // of the model
}

// OpenPrompts opens the tokenizer of an open model, and with chat the chat template.
func OpenPrompts(cfg config.Config, m *planner.Model, chat bool) (*Prompts, error) {
	h, err := m.Config()
	if err != nil {
		return nil, err
	}
	if cfg.Tokenizer == "" {
		cfg.Tokenizer = planner.ModelTokenizer(&cfg, m, h.Vocab)
	}
	p := &Prompts{Positions: h.Positions, Name: cfg.Tokenizer}
	if p.Tokenizer, err = openTokenizer(&cfg, m, h.Vocab); err != nil || !chat {
		return p, err
	}
	if p.Tokenizer != nil && p.Tokenizer.Name() == token.Bytes().Name() { // a saved model may have this tokenizer too, without a template
		if p.Name, err = byteChat("Config.Model "+cfg.ModelName(), h.Vocab); err != nil {
			return nil, err
		}
		p.Tokenizer = token.ByteChat()
	}
	template, err := readTemplate(&cfg)
	if err == nil {
		p.Dialog, err = data.NewDialog(p.Tokenizer, template)
	}
	return p, err
}

// byteChat returns the name of the bytes tokenizer for conversations, for a model of vocab tokens.
func byteChat(what string, vocab int) (string, error) {
	if n := token.ByteChat().VocabSize(); vocab < n {
		return "", config.Refuse("%s: a model of %d tokens has no end token for conversations in bytes; give the file of its own tokenizer as Config.Tokenizer, or a model with a vocabulary of at least %d", what, vocab, n)
	}
	return token.ByteChatName, nil
}

// readTemplate reads Config.Template; "" if none is given.
func readTemplate(c *config.Config) (string, error) {
	if c.Template == "" {
		return "", nil
	}
	text, err := regular.ReadFile(c.Template, maxTemplate)
	if err != nil {
		return "", fmt.Errorf("Config.Template: %w; give a file with a chat template in Jinja, or leave it out for the model's own", err)
	}
	return string(text), nil
}

// maxTemplate bounds a template's file.
const maxTemplate = 1 << 20
