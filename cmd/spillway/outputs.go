package main

import (
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/internal/outputs"
)

// refuseOverwriting refuses an output of a command that is its config file, a file of
// its model or another output, before anything is touched. What a run reads beside
// that, the run looks at itself.
func refuseOverwriting(fs *pflag.FlagSet) error {
	value := func(name string) string {
		if f := fs.Lookup(name); f != nil {
			return f.Value.String()
		}
		return ""
	}
	var out []outputs.Path
	for _, name := range []string{"metrics", "trace", "json", "html", "svg"} {
		out = append(out, outputs.Path{Flag: name, Path: value(name)})
	}
	return outputs.Check(out, append(outputs.ModelFiles("model", value("model")), outputs.Path{Flag: "config", Path: value("config")}))
}
