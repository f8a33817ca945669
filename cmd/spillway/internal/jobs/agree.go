package jobs

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/internal/release"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/train/job"
)

// Asked is what the command line of train asks of this process.
type Asked struct {
	Fs    *pflag.FlagSet
	C     *spillway.Config
	L     *options.Later
	Ranks bool // --ranks was given
	Demo  bool
}

// Settle reads the flags, with the config file, and refuses what can't be.
func (a *Asked) Settle(p *Place) (err error) {
	if a.Demo, err = options.Settle(a.Fs, a.C, a.L); err != nil {
		return err
	}
	return cmp.Or(settleRanks(a.C, a.Ranks, a.Fs.Changed("ranks-per-process"), p), p.refuseSurvivors(a.C), p.accepts(a.C, a.Ranks))
}

// OwnFlags are the flags in which the processes of a job may differ: paths, each process's
// threads, and caps on memory, of which the smallest counts. Docs: howto.md, "Ranks agree".
var OwnFlags = []string{"config", "threads", "device-memory", "host-memory", "metrics", "metrics-addr", "receipt", "receipt-every", "trace", "tensorboard", "export", "help"}

// contentFlags are compared by the content that their paths lead to, as far as this machine has
// it, and --order with the default that follows from the data.
var contentFlags = []string{"model", "data", "eval-data", "init", "tokenizer", "template", "order"}

// folderFlags are compared by whether they are given: each process may name the folder by
// another path, and --disk has a cap. That --checkpoint is one folder the ranks find out.
var folderFlags = []string{"checkpoint", "disk"}

// Of tells the job what this process was asked for, once the number of ranks is known.
func (a *Asked) Of(ctx context.Context, j *spillway.Job) error {
	terms, err := job.Terms(ctx, *a.C)
	if err != nil {
		return err
	}
	own := *a.C
	j.Asked, j.Terms = &own, map[string]string{"version": release.Text()}
	a.Fs.VisitAll(func(f *pflag.Flag) {
		switch v := f.Value.String(); {
		case slices.Contains(OwnFlags, f.Name), slices.Contains(contentFlags, f.Name):
		case slices.Contains(folderFlags, f.Name):
			j.Terms["--"+f.Name] = map[bool]string{true: "given", false: ""}[v != ""]
		default:
			j.Terms["--"+f.Name] = v
		}
	})
	for name, v := range terms {
		j.Terms["--"+name] = v
	}
	return nil
}

// RefuseTogether ends a process whose command line does not parse. Over MPI it meets the others
// first: see turnAway.
func RefuseTogether(err error) error {
	if err == nil {
		return nil
	}
	p, unplaced := FindPlace(cluster.Auto, "cpu", io.Discard)
	switch {
	case unplaced != nil || p.Transport != cluster.MPI:
		return err
	case p.Leads():
		return p.TurnAway(err)
	}
	return p.Work(context.Background(), &Asked{C: &spillway.Config{}}, err)
}

// settleRanks refuses a --ranks-per-process that can't be, and makes it the number of
// ranks of a process that is alone.
func settleRanks(c *spillway.Config, total, perProcess bool, p *Place) error {
	switch {
	case !perProcess:
		return nil
	case c.LocalRanks < 1 || c.LocalRanks > platform.MaxLocalRanks:
		return fmt.Errorf("--ranks-per-process %d: 1 to %d", c.LocalRanks, platform.MaxLocalRanks)
	case p.Transport != cluster.InProc: // see place.lead
	case total && c.Ranks != c.LocalRanks:
		return fmt.Errorf("--ranks %d with --ranks-per-process %d: one process runs all ranks here; spillway launch -n N starts several", c.Ranks, c.LocalRanks)
	default:
		c.Ranks, c.LocalRanks = c.LocalRanks, 0
	}
	return nil
}
