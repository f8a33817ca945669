package config

import "strings"

// Chat is what is done with conversations (Config.Data), but for EvalSplit. Rows have
// Config.Seq tokens.
type Chat struct {
	// Template is a file with a Jinja template; "" is the model's chat_template.
	Template string
	// LossOn is "answers" (or ""): what the model is to answer counts in the loss; or
	// "all": every token does.
	LossOn string
	// Long is "cut" (or ""): a conversation longer than Config.Seq loses its end; or
	// "drop": it is left out.
	Long string
	// Packing is "on": a row holds as many conversations as fit, each with its own positions
	// and attention; or "off": it holds one. "" is on for conversations on a CPU.
	Packing string
	// EvalSplit is the share of the conversations, or of the text's documents (files, or
	// records), below 1, that are held out and evaluated, drawn by Config.Seed; 0: none.
	EvalSplit float64
}

// Values of Chat.
const (
	LossOnAnswers = "answers"
	LossOnAll     = "all"
	LongCut       = "cut"
	LongDrop      = "drop"
	PackingOn     = "on"
	PackingOff    = "off"
)

// Packs says whether rows hold several documents. In a resolved Config it is decided.
func (c *Chat) Packs() bool { return strings.EqualFold(c.Packing, PackingOn) }

// CountsAll says whether every token counts in the loss.
func (c *Chat) CountsAll() bool { return strings.EqualFold(c.LossOn, LossOnAll) }

// DropsLong says whether long conversations are left out.
func (c *Chat) DropsLong() bool { return strings.EqualFold(c.Long, LongDrop) }

func (c *Chat) validate(of *Config) error {
	for _, err := range []error{oneOf("LossOn", c.LossOn, []string{"", LossOnAnswers, LossOnAll}), oneOf("Long", c.Long, []string{"", LongCut, LongDrop}), oneOf("Packing", c.Packing, []string{"", PackingOn, PackingOff})} {
		if err != nil {
			return err
		}
	}
	switch {
	case !(c.EvalSplit >= 0 && c.EvalSplit < 1):
		return Refuse("Config.EvalSplit %g: a share of at least 0 and below 1 is needed", c.EvalSplit)
	case c.Packs() && of.Own.Model != nil:
		return Refuse("Config.Packing on with Config.Own.Model: rows hold several documents where the model says so (graph.Builder.Documents); leave it out")
	case c.EvalSplit > 0 && (of.EvalData != "" || of.Own.Eval != nil):
		return Refuse("Config.EvalSplit with Config.EvalData: both give held-out data; leave one out")
	case c.EvalSplit > 0 && of.Own.Data != nil:
		return Refuse("Config.EvalSplit with Config.Own.Data: the program splits its samples; give Config.Own.Eval")
	case c.Given() != "" && of.Own.Data != nil:
		return Refuse("Config.%s with Config.Own.Data: the program's samples are no conversations; leave one out", c.Given())
	}
	return nil
}

// Given names the first field that is set for conversations alone; "" if none is.
func (c *Chat) Given() string {
	switch {
	case c.Template != "":
		return "Template"
	case c.LossOn != "":
		return "LossOn"
	case c.Long != "":
		return "Long"
	case c.Packs():
		return "Packing"
	}
	return ""
}
