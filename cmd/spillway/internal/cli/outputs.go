package cli

import (
	"cmp"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/internal/outputs"
)

// RefuseOverwriting rejects, before any file is written, an output that the command also reads or
// uses for another output. A run checks again once its default paths are known (the demo's data and
// checkpoints).
func RefuseOverwriting(fs *pflag.FlagSet) error {
	value := func(name string) string {
		if f := fs.Lookup(name); f != nil {
			return f.Value.String()
		}
		return ""
	}
	paths := func(names ...string) (list []outputs.Path) {
		for _, name := range names {
			list = append(list, outputs.Path{Name: "--" + name, Path: value(name)})
		}
		return list
	}
	out := paths("metrics", "receipt", "trace", "json", "html", "svg")
	in := paths("config", "from", "data", "eval-data", "tokenizer", "prompts", "template")
	models := outputs.Folders(paths("model", "init")...)
	for _, m := range paths("model", "init") {
		in = append(in, outputs.ModelFiles(m.Name, m.Path)...)
	}
	return cmp.Or(outputs.Check(out, in), outputs.CheckStored(append(out, paths("tensorboard", "export", "dump")...), models))
}
