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
	"strings"
	"time"

	"github.com/spillway-ml/spillway/checkpoint"
)

const (
	steps     = 30
	saveEvery = 3
)

// job is a configuration and the result of its uninterrupted run.
type job struct {
	name, work, binary string
	ranks              int // processes of a launch; 0: one process for all ranks
	args               []string
	sha                string
	length             time.Duration // of the uninterrupted run
}

// configurations are small runs whose states are stored and moved in different ways. If processes
// is set, each rank runs in a process (spillway launch).
var configurations = []struct {
	name, flags string
	processes   int
}{
	{"ZeRO-3, 2 ranks", "--ranks 2 --zero 3", 0},
	{"ZeRO-1, accumulation, dropout", "--ranks 2 --zero 1 --accum 2 --dropout 0.1", 0},
	{"host offload, shuffled, clip", "--ranks 2 --offload optimizer=host --order shuffled --clip 1", 0},
	{"disk tier", "--ranks 1 --offload optimizer=disk --disk DISK", 0},
	{"LAMB, frozen", "--ranks 3 --optimizer lamb --freeze wte.*,h.0.*", 0},
	{"launch, 2 ranks, ZeRO-3", "--zero 3", 2},
	{"launch, 3 ranks, ZeRO-0", "--zero 0 --accum 2", 3},
	{"launch, 4 ranks, HSDP", "--zero 2 --shard-size 2", 4},
}

// files writes model and data, and returns the beginning of a command that trains with them.
func (c *campaign) files() ([]string, error) {
	model, text := filepath.Join(c.work, "model"), filepath.Join(c.work, "text.txt")
	config := `{"model_type":"gpt2","n_layer":2,"n_head":2,"n_embd":32,"vocab_size":256,"n_positions":32}`
	words := strings.Repeat("a run that is killed goes on where its last checkpoint stands; ", 200)
	err := errors.Join(os.Mkdir(model, 0o755), os.WriteFile(filepath.Join(model, "config.json"), []byte(config), 0o644), os.WriteFile(text, []byte(words), 0o644))
	return []string{"train", "--model", model, "--data", text, "--seq", "16"}, err
}

// prepare runs each configuration without kills.
func (c *campaign) prepare(ctx context.Context) error {
	common, err := c.files()
	if err != nil {
		return err
	}
	common = append(common, "--batch", "2", "--steps", fmt.Sprint(steps))
	for _, f := range configurations {
		j := &job{name: f.name, work: c.work, binary: c.binary, ranks: f.processes, args: slices.Concat(common, strings.Fields(f.flags))}
		if f.processes > 0 {
			j.args = append([]string{"launch", "-n", fmt.Sprint(f.processes), "--"}, j.args...)
		}
		began := time.Now()
		if j.sha, err = j.end(ctx, filepath.Join(c.work, "whole")); err != nil {
			return fmt.Errorf("%s, undisturbed: %w", j.name, err)
		}
		j.length = time.Since(began)
		c.configs = append(c.configs, j)
	}
	return nil
}

// start starts the job with its checkpoints in dir, and resumes it if there are any.
func (j *job) start(ctx context.Context, dir string) (*exec.Cmd, *strings.Builder, error) {
	args := slices.Concat(j.args, []string{"--checkpoint", dir, "--save-every", fmt.Sprint(saveEvery), "--keep", "2", "--resume", "--metrics", metrics(dir)})
	for i, a := range args {
		args[i] = strings.ReplaceAll(a, "DISK", disk(dir))
	}
	cmd := exec.CommandContext(ctx, j.binary, args...)
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	return cmd, out, cmd.Start()
}

// end runs the job to its end, removes its files and returns the parameters' SHA-256.
func (j *job) end(ctx context.Context, dir string) (string, error) {
	cmd, out, err := j.start(ctx, dir)
	if err != nil {
		return "", err
	}
	if err := cmd.Wait(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	_, sha, ok := strings.Cut(out.String(), "SHA-256: ")
	if !ok || len(sha) < 64 {
		return "", fmt.Errorf("no SHA-256 in %s", out)
	}
	return sha[:64], errors.Join(clean(dir), remove(dir))
}

// remove removes a job's files.
func remove(dir string) error {
	return errors.Join(os.RemoveAll(dir), os.RemoveAll(metrics(dir)), os.RemoveAll(disk(dir)))
}

// clean checks that a run that ended left complete checkpoints and no incomplete one.
func clean(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	folders := 0
	for _, e := range entries {
		switch {
		case strings.HasPrefix(e.Name(), "step-"):
			folders++
		case !strings.HasPrefix(e.Name(), ".spillway-"):
			return fmt.Errorf("%s is left in %s", e.Name(), dir)
		}
	}
	if folders > 3 {
		return fmt.Errorf("--keep 2 left %d checkpoints in %s", folders, dir)
	}
	return nil
}

// trial kills a run as described by k, checks its leftovers, and resumes it.
func (j *job) trial(ctx context.Context, r *rand.Rand, k *kill) error {
	for try := range 100 {
		dir := filepath.Join(j.work, fmt.Sprintf("ck-%d-%d", k.Number, try))
		killed, err := j.kill(ctx, r, dir, *k)
		if err != nil {
			return err
		}
		if !killed { // the run had ended before the kill
			if err := remove(dir); err != nil {
				return err
			}
			continue
		}
		k.Amid = len(underWay(dir)) > 0
		at, err := newest(ctx, dir)
		if err != nil {
			return err
		}
		sha, err := j.end(ctx, dir)
		if err != nil {
			return err
		}
		if sha != j.sha {
			return fmt.Errorf("resumed after step %d, it ended in %s; undisturbed in %s", at.step, sha, j.sha)
		}
		k.Step, k.Lost = at.step, at.seen-at.step
		return nil
	}
	return errors.New("100 runs ended before they were killed")
}

// kill starts the job and kills it, or one rank. The time is random within the job's length, or, if
// aimed, shortly after the start of a save or a removal.
func (j *job) kill(ctx context.Context, r *rand.Rand, dir string, k kill) (killed bool, err error) {
	cmd, out, err := j.start(ctx, dir)
	if err != nil {
		return false, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var ranks []*os.Process
	if j.ranks > 0 {
		if ranks = ranksOf(cmd.Process.Pid, j.ranks); ranks == nil {
			return false, <-ended
		}
	}
	if k.Aimed {
		waitForSave(dir, 1+r.IntN(steps/saveEvery), ended)
		time.Sleep(time.Duration(r.Int64N(int64(4 * time.Millisecond))))
	} else {
		time.Sleep(time.Duration(r.Int64N(int64(j.length))))
	}
	if k.Rank != allRanks {
		return lose(ctx, cmd, out, ended, ranks, ranks[k.Rank])
	}
	all := append([]*os.Process{cmd.Process}, ranks...)
	r.Shuffle(len(all), func(a, b int) { all[a], all[b] = all[b], all[a] })
	for _, p := range all {
		if err := sigkill(p); err != nil {
			return false, err
		}
	}
	err = <-ended
	if err == nil {
		return false, nil
	}
	// A launcher that lives a moment longer than its ranks may report a lost one.
	if code := cmd.ProcessState.ExitCode(); code != -1 && (ranks == nil || code != lostStatus) {
		return false, fmt.Errorf("it ended by itself: %w: %s", err, out)
	}
	return true, gone(ctx, ranks)
}

// underWay lists the temporary names in dir.
func underWay(dir string) (names []string) {
	entries, _ := os.ReadDir(dir) // a missing folder has none
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".writing-") || strings.HasPrefix(e.Name(), ".removing-") {
			names = append(names, e.Name())
		}
	}
	return names
}

// waitForSave returns once the n-th temporary name has appeared in dir, or the run has ended. It
// puts the received value of ended back.
func waitForSave(dir string, n int, ended chan error) {
	seen := map[string]bool{}
	for {
		for _, name := range underWay(dir) {
			seen[name] = true
		}
		if len(seen) >= n {
			return
		}
		select {
		case err := <-ended:
			ended <- err
			return
		case <-time.After(100 * time.Microsecond):
		}
	}
}

// progress is the progress of a killed run: the newest checkpoint's step, and the last step in its
// metrics.
type progress struct{ step, seen int }

// newest verifies every checkpoint after a kill. None may be damaged. At most the steps between
// three saves may be lost: one save may be written asynchronously, and the next one waits for it.
func newest(ctx context.Context, dir string) (at progress, err error) {
	entries, err := checkpoint.Scan(dir)
	if err != nil {
		return at, err
	}
	for _, e := range entries {
		if _, err := checkpoint.Verify(ctx, e.Folder); err != nil {
			return at, err
		}
		at.step = max(at.step, e.Step)
	}
	text, err := os.ReadFile(metrics(dir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return at, err
	}
	at.seen = max(at.step, strings.Count(string(text), "\n"))
	if lost := at.seen - at.step; lost > 2*saveEvery {
		return at, fmt.Errorf("%d steps were done and the newest checkpoint is of step %d", at.seen, at.step)
	}
	return at, nil
}

// metrics returns the file with a line for each step of the run in dir.
func metrics(dir string) string { return dir + ".jsonl" }

// disk returns the folder of the disk tier of the run in dir.
func disk(dir string) string { return dir + ".disk" }
