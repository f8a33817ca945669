package planning

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/regular"
)

// maxDocument is the maximum size of a plan's document in bytes; they have about 100 KB.
const maxDocument = 64 << 20

// readFrom sets every flag of a plan's document that the command line does not set, and uses its
// machine instead of this one.
func (f *Flags) readFrom(fs *pflag.FlagSet, path string) error {
	switch {
	case fs.Changed("config"):
		return fmt.Errorf("--from %.80s with --config: each gives the flags of a plan; leave one out", path)
	case fs.Changed("calibrate"):
		return fmt.Errorf("--from %.80s with --calibrate: the file has the measurements of the machine that it was "+
			"made on; leave one out", path)
	}
	text, err := regular.ReadFile(path, maxDocument)
	if err != nil {
		return fmt.Errorf("--from: %w", err)
	}
	var doc struct {
		Version *int     `json:"version"`
		Command []string `json:"command"`
		Machine *Machine `json:"machine"`
	}
	const remedy = "give a file that spillway plan --json has written"
	if err := json.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("--from %.80s: not a plan's JSON (%w); %s", path, err, remedy)
	}
	switch {
	case doc.Version == nil:
		return fmt.Errorf("--from %.80s: it has no version, so it is no plan's JSON or one of an older spillway; %s",
			path, remedy)
	case *doc.Version != Version:
		return fmt.Errorf("--from %.80s: version %d is not known, only %d; read it with the spillway that wrote it, "+
			"or plan again", path, *doc.Version, Version)
	case len(doc.Command) == 0 || doc.Command[0] != "plan" || doc.Machine == nil:
		return fmt.Errorf("--from %.80s: its command or machine is missing; %s", path, remedy)
	}
	given := map[string]bool{}
	fs.Visit(func(flag *pflag.Flag) { given[flag.Name] = true })
	if err := setAll(fs, doc.Command[1:], given); err != nil {
		return fmt.Errorf("--from %.80s: %w; %s", path, err, remedy)
	}
	f.machine, f.read, f.diskHere = *doc.Machine, true, given["disk"]
	if given["model"] {
		f.machine.Model = nil
	}
	if given["disk"] {
		f.machine.Disk = nil
	}
	if given["gpu"] {
		f.machine.GPU = nil
	}
	if given["gpu"] || given["threads"] {
		f.machine.CPU = nil
	}
	return nil
}

// setAll sets flags from words of a command line, except the given ones.
func setAll(fs *pflag.FlagSet, words []string, given map[string]bool) error {
	for i := 0; i < len(words); i++ {
		name, value, joined := strings.Cut(strings.TrimPrefix(words[i], "--"), "=")
		flag := fs.Lookup(name)
		if flag == nil || !strings.HasPrefix(words[i], "--") || outputs[name] || name == "from" || name == "config" {
			return fmt.Errorf("%.80q is no flag of a plan's command", words[i])
		}
		switch {
		case joined:
		case flag.NoOptDefVal != "":
			value = flag.NoOptDefVal
		case i+1 == len(words):
			return fmt.Errorf("%.80q has no value", words[i])
		default:
			i++
			value = words[i]
		}
		if given[name] {
			continue
		}
		if err := fs.Set(name, value); err != nil {
			return cli.PlainFlagError(err)
		}
	}
	return nil
}
