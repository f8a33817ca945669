package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	elasticRanks = 4
	elasticSteps = 200
	// elasticPause is the mean time between two kills: long enough that most jobs get
	// to a checkpoint in between, short enough that not all do.
	elasticPause = 4 * time.Second
)

// outlive runs jobs that go on when they lose ranks, over and over kills one of their
// ranks, and compares their ends with a run on one rank.
func (c *campaign) outlive(ctx context.Context, runs int) error {
	common, err := c.files()
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(c.seed, 0))
	args := append(append([]string(nil), common...), "--steps", fmt.Sprint(elasticSteps), "--batch", "1", "--global-batch", "12", "--reproducible", "--clip", "1")
	one := &job{name: "one rank", work: c.work, binary: c.binary, args: args}
	want, err := one.end(ctx, filepath.Join(c.work, "one"))
	if err != nil {
		return err
	}
	for i := range runs {
		dir := filepath.Join(c.work, fmt.Sprint("elastic-", i))
		launched := append([]string{"launch", "-n", fmt.Sprint(elasticRanks), "--restarts", "20", "--min-ranks", "1", "--"}, args...)
		began := time.Now()
		kills, out, err := killing(ctx, exec.CommandContext(ctx, c.binary, append(launched, "--checkpoint", dir, "--save-every", "10", "--keep", "2")...), r)
		if err != nil {
			return fmt.Errorf("run %d of %d, after %d kills: %w: %s", i+1, runs, kills, err, out)
		}
		if _, sha, _ := strings.Cut(out, "SHA-256: "); !strings.HasPrefix(sha, want) {
			return fmt.Errorf("run %d of %d, after %d kills, ended in other parameters than one rank's %s: %s", i+1, runs, kills, want, out)
		}
		fmt.Printf("run %d: %d ranks killed, formed again at %s, %s\n", i+1, kills, strings.Join(formed(out), " "), time.Since(began).Round(time.Second))
		if err := errors.Join(clean(dir), os.RemoveAll(dir)); err != nil {
			return err
		}
	}
	fmt.Printf("%d runs; every one ended by itself in the parameters of one rank\n", runs)
	return nil
}

// killing runs a job to its end, and kills one of its ranks, any, every few seconds.
func killing(ctx context.Context, cmd *exec.Cmd, r *rand.Rand) (kills int, said string, err error) {
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return 0, "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case err := <-ended:
			return kills, out.String(), err
		case <-ctx.Done():
			return kills, "", ctx.Err()
		case <-time.After(elasticPause/2 + time.Duration(r.Int64N(int64(elasticPause)))):
		}
		pids := children(cmd.Process.Pid)
		if len(pids) == 0 {
			continue
		}
		if p, err := os.FindProcess(pids[r.IntN(len(pids))]); err == nil && p.Kill() == nil {
			kills++
		}
	}
}

// children lists what a process has started, by any of its threads.
func children(pid int) (pids []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, t := range tasks {
		text, _ := os.ReadFile(t) // a thread that has ended has none
		for _, f := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(f); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// formed lists the world sizes that a job has gone on with.
func formed(out string) (sizes []string) {
	for _, part := range strings.Split(out, "going on with ")[1:] {
		if n, _, ok := strings.Cut(part, " rank"); ok {
			sizes = append(sizes, n)
		}
	}
	return sizes
}
