package main

import (
	"context"
	"io"
	"slices"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/train/job"
)

// asked is what the command line of train asks of this process.
type asked struct {
	fs    *pflag.FlagSet
	c     *spillway.Config
	l     *later
	ranks bool // --ranks was given
	demo  bool
}

// settle reads the flags, with the config file, and refuses what can't be.
func (a *asked) settle(p *place) (err error) {
	a.demo, err = settle(a.fs, a.c, a.l)
	for _, check := range []func() error{
		func() error { return settleRanks(a.c, a.ranks, a.fs.Changed("ranks-per-process"), p) },
		func() error { return p.refuseSurvivors(a.c) },
		func() error { return p.accepts(a.c, a.ranks) },
	} {
		if err != nil {
			break
		}
		err = check()
	}
	return err
}

// ownFlags are the flags in which the processes of a job may differ: paths, each process's
// threads, and caps on memory, of which the smallest counts. Docs: howto.md, "Ranks agree".
var ownFlags = []string{"config", "threads", "device-memory", "host-memory", "metrics", "metrics-addr", "trace", "tensorboard", "export", "help"}

// contentFlags are compared by the content that their paths lead to, as far as this machine has
// it, and --order with the default that follows from the data.
var contentFlags = []string{"model", "data", "eval-data", "init", "tokenizer", "order"}

// folderFlags are compared by whether they are given: each process may name the folder by
// another path, and --disk has a cap. That --checkpoint is one folder the ranks find out.
var folderFlags = []string{"checkpoint", "disk"}

// of tells the job what this process was asked for, once the number of ranks is known.
func (a *asked) of(ctx context.Context, j *spillway.Job) error {
	terms, err := job.Terms(ctx, *a.c)
	if err != nil {
		return err
	}
	own := *a.c
	j.Asked, j.Terms = &own, map[string]string{"version": release()}
	a.fs.VisitAll(func(f *pflag.Flag) {
		switch v := f.Value.String(); {
		case slices.Contains(ownFlags, f.Name), slices.Contains(contentFlags, f.Name):
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

// refuseTogether ends a process whose command line does not parse. Over MPI it meets the others
// first: see turnAway.
func refuseTogether(err error) error {
	if err == nil {
		return nil
	}
	p, unplaced := findPlace(cluster.Auto, "cpu", io.Discard)
	switch {
	case unplaced != nil || p.transport != cluster.MPI:
		return err
	case p.leads():
		return p.turnAway(err)
	}
	return p.work(&asked{c: &spillway.Config{}}, err)
}
