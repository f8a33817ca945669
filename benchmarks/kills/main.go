// Command kills kills tiny training runs with SIGKILL at random moments, half of them aimed at
// saves. It kills a complete run, or one rank of a job over processes. Each run is resumed and must
// end with the parameters of an uninterrupted run. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
)

func main() {
	kills := flag.Int("kills", 2000, "how many runs to kill")
	seed := flag.Uint64("seed", 0, "of the moments; 0: another each time")
	dir := flag.String("dir", "", "`DIR` to work in, on the filesystem to try (default: the system's temporary folder)")
	jobs := flag.Int("jobs", 1, "how many runs are under way at once")
	log := flag.String("log", "", "`FILE` with a line for each kill: what it has is not done again, so that a campaign can go on")
	elastic := flag.Int("elastic", 0, "instead, run `N` jobs that go on with the ranks that are left, and kill one every few seconds")
	binary := flag.String("binary", "", "the spillway `FILE` to kill (default: built from this tree)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	c := &campaign{kills: *kills, seed: *seed, jobs: max(*jobs, 1), binary: *binary}
	if err := c.run(ctx, *dir, *log, *elastic); err != nil {
		fmt.Fprintln(os.Stderr, "kills:", err)
		os.Exit(1)
	}
}

// campaign is a number of kills; the i-th depends only on the seed and i.
type campaign struct {
	kills, jobs  int
	seed         uint64
	work, binary string
	configs      []*job
	log          *journal
}

// run works in a folder below dir, which is kept if a kill shows a fault.
func (c *campaign) run(ctx context.Context, dir, log string, elastic int) (err error) {
	if c.log, err = openJournal(log, &c.seed); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.log.close()) }()
	fmt.Printf("seed %d\n", c.seed)
	if c.work, err = os.MkdirTemp(dir, "spillway-kills-"); err != nil {
		return err
	}
	if c.binary, err = bench.Spillway(c.binary, c.work); err != nil {
		return err
	}
	do := func() error { return c.all(ctx) }
	if elastic > 0 {
		do = func() error { return c.outlive(ctx, elastic) }
	}
	if err := do(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("%w\nwhat there was is left in %s", err, c.work)
	} else if err != nil {
		return errors.Join(err, os.RemoveAll(c.work))
	}
	return os.RemoveAll(c.work)
}

// all does the remaining kills of the campaign and prints its table.
func (c *campaign) all(ctx context.Context) error {
	if err := c.prepare(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	go func() {
		defer close(next)
		for i := range c.kills {
			if c.log.has(i) {
				continue
			}
			select {
			case next <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	began, before := time.Now(), c.log.len()
	var workers sync.WaitGroup
	for range c.jobs {
		workers.Go(func() {
			for i := range next {
				if err := c.one(ctx, i); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	workers.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	fmt.Printf("%d kills", c.log.len())
	if before > 0 {
		fmt.Printf(", %d of them from the log; the others", before)
	}
	fmt.Printf(" in %s; every resume ended in the uninterrupted run's parameters\n", time.Since(began).Round(time.Second))
	return c.log.table(os.Stdout, c.configs)
}

// one does the i-th kill and records it. Half of the kills are of one rank of a job over processes,
// the others of a complete run of any configuration.
func (c *campaign) one(ctx context.Context, i int) error {
	r := rand.New(rand.NewPCG(c.seed, uint64(i)))
	among, rank := c.configs, allRanks
	if r.IntN(2) == 0 {
		among = slices.DeleteFunc(slices.Clone(among), func(j *job) bool { return j.ranks == 0 })
	}
	j := among[r.IntN(len(among))]
	if len(among) < len(c.configs) {
		rank = r.IntN(j.ranks)
	}
	k := kill{Number: i, Configuration: j.name, Rank: rank, Aimed: r.IntN(2) == 0}
	if err := j.trial(ctx, r, &k); err != nil {
		return fmt.Errorf("kill %d of %d (%s): %w", i+1, c.kills, j.name, err)
	}
	n, err := c.log.add(k)
	if n%50 == 0 {
		fmt.Fprintf(os.Stderr, "%d kills\n", n)
	}
	return err
}
