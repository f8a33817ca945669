package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	elasticRanks  = 5
	elasticSteps  = 80
	elasticLeaves = 12 // micro-batches of a step; 5 ranks do not divide them
)

// outlive runs jobs that continue when they lose ranks, repeatedly kills one of their ranks, and
// compares their results with those of a run on one rank.
func (c *campaign) outlive(ctx context.Context, runs int) error {
	common, err := c.files()
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(c.seed, 0))
	args := append(append([]string(nil), common...), "--steps", fmt.Sprint(elasticSteps), "--batch", "2", "--global-batch", fmt.Sprint(2*elasticLeaves-1), "--reproducible", "--clip", "1")
	one := &job{name: "one rank", work: c.work, binary: c.binary, args: args}
	want, err := one.end(ctx, filepath.Join(c.work, "one"))
	if err != nil {
		return err
	}
	all := 0
	for i := range runs {
		dir := filepath.Join(c.work, fmt.Sprint("elastic-", i))
		launched := append([]string{"launch", "-n", fmt.Sprint(elasticRanks), "--restarts", "20", "--min-ranks", "1", "--"}, args...)
		began := time.Now()
		kills, out, err := killing(ctx, exec.CommandContext(ctx, c.binary, append(launched, "--checkpoint", dir, "--save-every", "4", "--keep", "2", "--zero", fmt.Sprint(r.IntN(4)), "--rank-shares", shares(r))...), dir, r)
		if err != nil {
			return fmt.Errorf("run %d of %d, after %d kills: %w: %s", i+1, runs, kills, err, out)
		}
		if _, sha, _ := strings.Cut(out, "SHA-256: "); !strings.HasPrefix(sha, want) {
			return fmt.Errorf("run %d of %d, after %d kills, ended in other parameters than one rank's %s: %s", i+1, runs, kills, want, out)
		}
		all += kills
		fmt.Printf("run %d: %d ranks killed, formed again at %s, %s\n", i+1, kills, strings.Join(formed(out), " "), time.Since(began).Round(time.Second))
		if err := errors.Join(clean(dir), os.RemoveAll(dir)); err != nil {
			return err
		}
	}
	fmt.Printf("%d runs and %d kills (seed %d); every one ended by itself in the parameters of one rank\n", runs, all, c.seed)
	return nil
}

// shares returns random initial --rank-shares of a job.
func shares(r *rand.Rand) string {
	n := make([]int, elasticRanks)
	for i := range elasticLeaves {
		if i < len(n) {
			n[i]++
		} else {
			n[r.IntN(len(n))]++
		}
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(n), " ", ","), "[]")
}

// killing runs a job to its end. Two to four times it kills any one of its ranks, up to half a
// second after the job has begun a new checkpoint.
func killing(ctx context.Context, cmd *exec.Cmd, dir string, r *rand.Rand) (kills int, said string, err error) {
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return 0, "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	newest, most := "", 2+r.IntN(3)
	var kill <-chan time.Time
	for {
		select {
		case err := <-ended:
			return kills, out.String(), err
		case <-ctx.Done():
			return kills, "", ctx.Err()
		case <-tick.C:
			if list, _ := filepath.Glob(filepath.Join(dir, "step-*")); kill == nil && kills < most && len(list) > 0 && slices.Max(list) > newest {
				newest = slices.Max(list)
				kill = time.After(time.Duration(r.Int64N(int64(time.Second / 2))))
			}
		case <-kill:
			kill = nil
			pids := children(cmd.Process.Pid)
			if len(pids) == 0 {
				continue
			}
			if p, err := os.FindProcess(pids[r.IntN(len(pids))]); err == nil && p.Kill() == nil {
				kills++
			}
		}
	}
}

// children lists the processes that any thread of a process has started.
func children(pid int) (pids []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, t := range tasks {
		text, _ := os.ReadFile(t) // a thread that has ended has no children
		for _, f := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(f); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// formed lists the world sizes with which a job has continued.
func formed(out string) (sizes []string) {
	for _, part := range strings.Split(out, "going on with ")[1:] {
		if n, _, ok := strings.Cut(part, " rank"); ok {
			sizes = append(sizes, n)
		}
	}
	return sizes
}
