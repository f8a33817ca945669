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

// Asked is the parsed command line of train in this process.
type Asked struct {
	Fs    *pflag.FlagSet
	C     *spillway.Config
	L     *options.Later
	Ranks bool // --ranks was given
	Demo  bool
}

// Settle applies the config file or the demo's values, and rejects invalid settings.
func (a *Asked) Settle(p *Place) (err error) {
	if a.Demo, err = options.Settle(a.Fs, a.C, a.L); err != nil {
		return err
	}
	return cmp.Or(settleRanks(a.C, a.Ranks, a.Fs.Changed("ranks-per-process"), p), p.refuseSurvivors(a.C), p.accepts(a.C, a.Ranks))
}

// OwnFlags are the flags in which the processes of a job may differ: paths, each process's threads,
// and memory caps, of which the smallest counts. Docs: howto.md, "Ranks agree".
var OwnFlags = []string{"config", "threads", "device-memory", "host-memory", "metrics", "metrics-addr", "receipt", "receipt-every", "trace", "tensorboard", "export", "help"}

// contentFlags are compared by the contents of their paths, if this machine has them; --order is
// compared after its default is derived from the data.
var contentFlags = []string{"model", "data", "eval-data", "init", "tokenizer", "template", "order"}

// folderFlags are compared by whether they are given: each process may name the folder by another
// path, and --disk includes a cap. The ranks check later that --checkpoint is the same folder.
var folderFlags = []string{"checkpoint", "disk"}

// Of sets the job's terms, which must agree in all processes, from this process's settings. The
// number of ranks must be known.
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

// RefuseTogether ends a process whose command line does not parse. Over MPI it joins the other
// processes first: see Place.TurnAway.
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

// settleRanks rejects an invalid --ranks-per-process. For a process that runs alone it sets the
// number of ranks.
func settleRanks(c *spillway.Config, total, perProcess bool, p *Place) error {
	switch {
	case !perProcess:
		return nil
	case c.LocalRanks < 1 || c.LocalRanks > platform.MaxLocalRanks:
		return fmt.Errorf("--ranks-per-process %d: 1 to %d", c.LocalRanks, platform.MaxLocalRanks)
	case p.Transport != cluster.InProc: // see Place.Lead
	case total && c.Ranks != c.LocalRanks:
		return fmt.Errorf("--ranks %d with --ranks-per-process %d: one process runs all ranks here; spillway launch -n N starts several", c.Ranks, c.LocalRanks)
	default:
		c.Ranks, c.LocalRanks = c.LocalRanks, 0
	}
	return nil
}
