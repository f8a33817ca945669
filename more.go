package spillway

import "github.com/spillway-ml/spillway/train"

// ContextFor is the Seq of a run that continues a prompt by n tokens.
func ContextFor(cfg Config, prompt string, n int) (int, error) {
	return train.ContextFor(cfg, prompt, n)
}

// ModelFiles are the names of all files that a checkpoint may hold for Hugging Face's
// loaders, beside the weights.
func ModelFiles() []string { return train.ModelFiles() }

// Positions is the longest sequence of a model.
func Positions(model string) (int, error) { return train.Positions(model) }

// OtherBits says that two configurations of one job differ in the last bits of their
// results; "" where they do not.
func OtherBits(asked, chosen *Config) string { return train.OtherBits(asked, chosen) }

// Reasons say what bounds a plan and what it computes again and moves, a line each.
func Reasons(f *Forecast) []string { return train.Reasons(f) }

// Explain reads a forecast's program.
func Explain(f *Forecast) Explanation { return train.Explain(f) }

// Shell joins words as a shell takes them.
func Shell(args []string) string { return train.Shell(args) }

// Shortfall says what a plan that does not fit needs of every capped space.
func Shortfall(f *Forecast) string { return train.Shortfall(f) }
