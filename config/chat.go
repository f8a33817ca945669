package config

import "strings"

// Values of Chat's fields.
const (
	LossOnAnswers = "answers"
	LossOnAll     = "all"
	LongCut       = "cut"
	LongDrop      = "drop"
	PackingOn     = "on"
	PackingOff    = "off"
)

// Packs says whether rows hold several documents. It is valid only for a resolved Config.
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

// Given returns the name of the first set field that applies to conversations only; "" if none
// is set.
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

// Evaluates says whether there is held-out data.
func (c *Config) Evaluates() bool { return c.EvalData != "" || c.EvalSplit > 0 || c.Own.Eval != nil }
