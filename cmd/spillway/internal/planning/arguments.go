package planning

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/planner"
)

// outputs are the flags of plan that determine where the answer goes. --calibrate is among them
// because its measurements are in the document.
var outputs = map[string]bool{"json": true, "html": true, "dump": true, "emit": true, "calibrate": true}

// asked returns the arguments of the request.
func (f *Flags) asked() []string {
	args := []string{"plan"}
	for _, g := range f.given {
		args = append(args, g.words()...)
	}
	return args
}

// question returns the arguments of the request without its outputs.
func (f *Flags) question() []string {
	q := Flags{given: slices.DeleteFunc(slices.Clone(f.given), func(g setFlag) bool { return outputs[g.name] })}
	return q.asked()
}

// command returns a command that runs a configuration. If train rejects it, that is the plan's
// command, together with the reason.
func (f *Flags) command(c *config.Config, changes []string) (text string, refused error) {
	if refused = f.runnable(*c); refused != nil {
		again := *f
		again.given = slices.DeleteFunc(slices.Clone(f.given), func(g setFlag) bool { return g.name == "ask" })
		return "spillway " + planner.Shell(cli.WithFlags(again.question(), changes)), refused
	}
	env := cluster.Env{World: 1}
	args := cli.WithFlags(f.trainArgs(c, "DATA"), trainable(changes))
	switch nodes := f.servers(c); {
	case nodes > 1:
		args = cli.WithFlags(args, []string{"--ranks", ""}) // srun sets the number
		return fmt.Sprintf("srun --nodes=%d --ntasks-per-node=%d spillway ", nodes, f.nodeSize) +
			planner.Shell(args[:len(args)-2]), nil
	case f.gpuFound == nil && c.Ranks > 1 && strings.EqualFold(f.transport, cluster.SHM):
		env = cluster.Env{Source: cluster.Launch, World: c.Ranks / max(c.LocalRanks, 1)}
	case f.gpuFound == nil && c.Ranks > 1 && strings.EqualFold(f.transport, cluster.MPI):
		env = cluster.Env{Source: cluster.OpenMPI, World: c.Ranks / max(c.LocalRanks, 1)}
	}
	return cli.WholeCommand(env, c.Ranks, max(c.LocalRanks, 1), args, nil), nil
}

// runnable returns the reason why train does not run a configuration on the planned device; nil: it
// does. Train's advice is cut off, because it would name another device.
func (f *Flags) runnable(c config.Config) error {
	if f.gpuFound == nil {
		return nil
	}
	if f.gpuFound.Arch == gpus.CDNA3 {
		return errors.New("--device cuda runs on NVIDIA's GPUs alone")
	}
	c.Device = "cuda"
	err := cmp.Or(c.Runnable(), planner.Runnable(&c), c.Validate())
	if err == nil {
		return nil
	}
	why, _, _ := strings.Cut(err.Error(), "; ")
	return errors.New(why)
}

// trainable returns the changes for which train has flags.
func trainable(changes []string) (out []string) {
	known, keep := options.TrainSet(), false
	for _, word := range changes { // a flag, or its value
		if name, is := strings.CutPrefix(word, "--"); is {
			keep = known.Lookup(name) != nil
		}
		if keep {
			out = append(out, word)
		}
	}
	return out
}

// trainArgs returns the request's flags for train, with data as --data if they have none.
func (f *Flags) trainArgs(c *config.Config, data string) []string {
	known := options.TrainSet()
	args := []string{"train"}
	for _, g := range f.given {
		switch g.name {
		case "fit", "allow", "transport", "device", "ranks": // already chosen, or added below
			continue
		}
		if known.Lookup(g.name) != nil {
			args = append(args, g.words()...)
			if g.name == "data" {
				data = ""
			}
		}
	}
	if c.Ranks > 1 {
		args = append(args, "--ranks", fmt.Sprint(c.Ranks))
	}
	if f.gpuFound != nil {
		args = append(args, "--device", "cuda")
	}
	if f.nodeMemory > 0 {
		args = cli.WithFlags(args, []string{"--host-memory", cli.SizeText(c.HostMemory)})
	}
	if data != "" {
		args = append(args, "--data", data)
	}
	return args
}
