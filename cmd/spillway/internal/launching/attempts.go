package launching

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/launch"
)

// generation is the result of running a job's processes once.
type generation struct {
	end   launch.End
	joins bool // launch ended it so that more ranks can join
	asked bool // a signal from outside ended it
}

// runOnce runs the job once and relays signals to it. until, if given, runs concurrently; if it
// returns true the job is signaled to save and end. stop is closed when the job has ended.
func runOnce(cmd *cobra.Command, o launch.Options, signals <-chan os.Signal, until func(stop <-chan struct{}) bool) (g generation, err error) {
	passed, stop := make(chan os.Signal), make(chan struct{})
	send := func(s os.Signal) {
		select {
		case passed <- s:
		case <-stop:
		}
	}
	var beside sync.WaitGroup
	beside.Go(func() {
		defer crash.Guard()
		interrupted := cmd.Context().Done() // also canceled by a signal before signals received any
		for {
			select {
			case s := <-signals:
				g.asked = g.asked || ends(s)
				send(s)
			case <-interrupted:
				interrupted, g.asked = nil, true
				send(syscall.SIGTERM)
			case <-stop:
				return
			}
		}
	})
	if until != nil {
		beside.Go(func() {
			defer crash.Guard()
			if until(stop) {
				g.joins = true
				send(syscall.SIGTERM)
			}
		})
	}
	// The command's context ends with the first interrupt; the job must run until its ranks have
	// saved and ended.
	end, err := launch.Run(context.WithoutCancel(cmd.Context()), o, passed)
	close(stop)
	beside.Wait()
	g.end = end
	return g, withRemedy(err)
}

const (
	// IdleRestarts is the number of attempts in a row without a newer checkpoint that end a job
	// with --restarts: the cause that stopped two of them will stop the next.
	IdleRestarts = 2
	// firstPause is the wait before the first restart. It doubles for each later one, up to
	// longestPause.
	firstPause   = time.Second
	longestPause = time.Minute
)

// attempts counts the attempts of a job that restarts after losing ranks.
type attempts struct {
	saved jobs.OwnCheckpoints
	limit int // of attempts in a row without a newer checkpoint
	step  int // of the newest checkpoint when the last attempt began
	idle  int // attempts in a row that left no newer one
	pause time.Duration
}

func attemptsFrom(saved jobs.OwnCheckpoints, limit int) attempts {
	a := attempts{saved: saved, limit: limit}
	a.step, _ = saved.Newest()
	return a
}

// again records the end of an attempt that lost ranks, and reports whether it left no newer
// checkpoint. An error ends the job.
func (a *attempts) again(w io.Writer) (idle bool, err error) {
	if step, _ := a.saved.Newest(); step > a.step {
		a.step, a.idle = step, 0
		return false, nil
	}
	if a.idle++; a.idle >= a.limit {
		where, _ := a.saved.From()
		fmt.Fprintf(w, "spillway: launch: not starting again: %d attempts in a row have left no checkpoint newer than %s; find out why they ended, or save more often (--save-every), then go on with --resume\n", a.idle, where)
		return true, cli.StatusError(launch.LostStatus)
	}
	return true, nil
}

// next returns the next wait, twice the previous one.
func (a *attempts) next() time.Duration {
	a.pause = min(max(2*a.pause, firstPause), longestPause)
	return a.pause
}

// wait waits for d, or until ctx is done.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return cli.Interrupted("interrupted while waiting to start again; train --resume goes on from the newest checkpoint")
	}
}
