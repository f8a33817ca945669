//go:build linux

package launching

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/launch"
)

const testdata = "../../../../testdata"

func TestElasticRefusals(t *testing.T) {
	config := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(config, []byte("model: "+testdata+"/gpt2\ndata: "+testdata+"/text.bin\nbatch: 2\nglobal-batch: 24\ncheckpoint: ck\n"), 0o600))
	for _, c := range []struct{ flags, args, want string }{
		{"1 0", "train --model gpt2 --data d", "--min-ranks needs train's --checkpoint"},
		{"5 0", "train --model gpt2 --data d --checkpoint c", "--min-ranks 5 is over the 4 of -n"},
		{"1 5", "train --model gpt2 --data d --checkpoint c", "--max-ranks 5 is over the 4 of -n"},
		{"3 2", "train --model gpt2 --data d --checkpoint c", "--max-ranks 2 is under --min-ranks 3"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --ranks-per-process 2", "--min-ranks with --ranks-per-process"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --tensor 2", "--min-ranks with --tensor"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --pipeline 2", "--min-ranks with --pipeline"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --batch 0", "--batch 0: at least 1"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --batch 5 --global-batch 24", "Config.GlobalBatch 24 is no multiple of Config.Batch 5 rows"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --batch 4 --global-batch 24", "Config.GlobalBatch 24 is 6 micro-batches of Config.Batch 4, which 4 ranks do not divide; 3 or 6 ranks do"},
		{"1 0", "train --model gpt2 --data d --checkpoint c --batch 4 --global-batch 12 --reproducible", "Config.GlobalBatch 12 is 3 micro-batches of Config.Batch 4, and each of 4 ranks needs one"},
		{"1 0", "train --model gpt2 --nope", "nope"},
		{"1 0", "bench comm", "--min-ranks is for launch of train and finetune"},
		{"1 0", "train --config " + config, ""},
	} {
		var f launchFlags
		f.minRanks, f.maxRanks = int(c.flags[0]-'0'), int(c.flags[2]-'0')
		var said bytes.Buffer
		e, err := newElastic(launch.Options{Ranks: 4, Args: strings.Fields(c.args), Stderr: &said}, f)
		if c.want == "" {
			require.NoError(t, err)
			require.Equal(t, 12, e.team.Leaves)
			require.Contains(t, said.String(), "without --reproducible the bits depend on the number of ranks")
			continue
		}
		require.ErrorContains(t, err, c.want)
	}
}

// A host that refuses more processes is a fault, not bad input.
func TestNoMoreProcesses(t *testing.T) {
	err := withRemedy(&fs.PathError{Op: "fork/exec", Path: "spillway", Err: syscall.EAGAIN})
	require.EqualError(t, err, "fork/exec spillway: resource temporarily unavailable: "+
		"this user may start no more processes and threads: raise ulimit -u, or the limit on pids of the container")
	require.Equal(t, cli.ExitFault, cli.ExitStatus(err))
}

// Any number of ranks can share the step of a reproducible job. The original number uses the given
// shares.
func TestElasticShares(t *testing.T) {
	args := strings.Fields("train --model gpt2 --data d --checkpoint c --batch 2 --global-batch 15 --reproducible --rank-shares 1,3,2,2")
	e, err := newElastic(launch.Options{Ranks: 4, Args: args}, launchFlags{minRanks: 1})
	require.NoError(t, err)
	require.Equal(t, 8, e.team.Leaves)
	require.Equal(t, []string{"--accum", "3", "--global-batch", "15", "--rank-shares", "1,3,2,2"}, e.shared(4))
	require.Equal(t, []string{"--accum", "3", "--global-batch", "15", "--rank-shares", "even"}, e.shared(3))
	e.team.Lose(1)
	require.Equal(t, []int{3, 2, 1}, e.team.Sizes())

	// With a batch schedule every step has at least one micro-batch for each rank or, without
	// --reproducible, equally many.
	for args, want := range map[string][]int{"--batch 2 --batch-schedule 0:7,3:15 --reproducible": {4, 3, 2, 1}, "--batch 1 --batch-schedule 0:12,3:20": {4, 2, 1}} {
		e, err := newElastic(launch.Options{Ranks: 4, Args: append(strings.Fields("train --model gpt2 --data d --checkpoint c"), strings.Fields(args)...), Stderr: io.Discard}, launchFlags{minRanks: 1})
		require.NoError(t, err)
		require.Equal(t, want, e.team.Sizes())
		require.Empty(t, e.shared(2))
	}
}

// If rank 0 is lost, only the launcher can tell the step.
func TestTheStepOfALoss(t *testing.T) {
	var out bytes.Buffer
	tellEnd(&out, launch.End{Lost: "rank 0 (process 7): signal: killed", Failure: "rank 0 died in x", Flight: "rank 0: none\n", Steps: 12})
	require.Equal(t, "spillway: launch: rank 0 (process 7): signal: killed\nspillway: launch: the job ended after step 12 with: rank 0 died in x\nthe last operations of each rank:\nrank 0: none\n", out.String())
	out.Reset()
	tellEnd(&out, launch.End{Failure: "rank 0 died in x", Flight: "rank 0: none\n"})
	require.Contains(t, out.String(), "the job ended with: rank 0 died in x\n")
}

// The pauses between attempts grow. A newer checkpoint counts as progress.
func TestAttempts(t *testing.T) {
	a := attempts{saved: jobs.CheckpointsOf(t.TempDir(), false), limit: 3}
	var pauses []time.Duration
	for range 8 {
		pauses = append(pauses, a.next())
	}
	require.Equal(t, []time.Duration{1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 60e9, 60e9}, pauses)
	var said strings.Builder
	idle, err := a.again(&said)
	require.NoError(t, err)
	require.True(t, idle)
	c := spillway.Default()
	c.Model, c.Data, c.Steps, c.Batch, c.Seq, c.Checkpoint = testdata+"/gpt2", testdata+"/text.bin", 2, 1, 16, a.saved.Folder
	run, err := spillway.New(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, run.Run(t.Context(), nil))
	require.NoError(t, run.Close())
	idle, err = a.again(&said)
	require.NoError(t, err)
	require.False(t, idle, "step 2 was saved")
	for range 2 {
		_, err = a.again(&said)
		require.NoError(t, err)
	}
	_, err = a.again(&said)
	var status cli.StatusError
	require.True(t, errors.As(err, &status))
	require.EqualValues(t, cli.ExitFault, status)
	require.Contains(t, said.String(), "newer than the checkpoint of step 2")
}
