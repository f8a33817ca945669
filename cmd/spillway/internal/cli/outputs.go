package cli

import (
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/internal/outputs"
)

// RefuseOverwriting refuses an output of a command that it reads too or writes for
// another purpose, before anything is touched. A run looks again at what it has by
// default (the demo's data, its checkpoints).
func RefuseOverwriting(fs *pflag.FlagSet) error {
	value := func(name string) string {
		if f := fs.Lookup(name); f != nil {
			return f.Value.String()
		}
		return ""
	}
	var out []outputs.Path
	for _, name := range []string{"metrics", "receipt", "trace", "json", "html", "svg"} {
		out = append(out, outputs.Path{Name: "--" + name, Path: value(name)})
	}
	in := outputs.ModelFiles("--model", value("model"))
	for _, name := range []string{"config", "from", "data", "eval-data", "tokenizer", "prompts", "template"} {
		in = append(in, outputs.Path{Name: "--" + name, Path: value(name)})
	}
	return outputs.Check(out, in)
}
