// Command kills kills tiny training runs with SIGKILL at random moments, half of
// them aimed at saves, and resumes each: it must end in the parameters of a run
// that nobody killed. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spillway-ml/spillway/checkpoint"
)

func main() {
	kills := flag.Int("kills", 500, "how many runs to kill")
	seed := flag.Uint64("seed", 0, "of the moments; 0: another each time")
	dir := flag.String("dir", "", "`DIR` to work in, on the filesystem to try (default: the system's temporary folder)")
	ranks := flag.Bool("ranks", false, "kill single ranks of jobs over processes (spillway launch) instead of whole runs")
	elastic := flag.Int("elastic", 0, "instead, run `N` jobs that go on with the ranks that are left, and kill one every few seconds")
	binary := flag.String("binary", "", "the spillway `FILE` to kill (default: built from this tree)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	if err := campaign(ctx, *kills, *elastic, *seed, *ranks, *dir, *binary); err != nil {
		fmt.Fprintln(os.Stderr, "kills:", err)
		os.Exit(1)
	}
}

// campaign kills as many runs as told, in turn over the configurations.
func campaign(ctx context.Context, kills, elastic int, seed uint64, ranks bool, dir, binary string) error {
	fmt.Printf("seed %d\n", seed)
	work, err := os.MkdirTemp(dir, "spillway-kills-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if binary == "" {
		binary = filepath.Join(work, "spillway")
		if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/spillway-ml/spillway/cmd/spillway").CombinedOutput(); err != nil {
			return fmt.Errorf("build: %w: %s", err, out)
		}
	}
	r := rand.New(rand.NewPCG(seed, 0))
	if elastic > 0 {
		common, err := files(work)
		if err != nil {
			return err
		}
		return outlive(ctx, elastic, r, work, binary, common)
	}
	jobs, err := prepare(ctx, work, binary, ranks)
	if err != nil {
		return err
	}
	began := time.Now()
	for i := range kills {
		job := jobs[i%len(jobs)]
		if err := job.trial(ctx, r, i/len(jobs)%2 == 0); err != nil {
			return fmt.Errorf("kill %d of %d (%s): %w", i+1, kills, job.name, err)
		}
		if (i+1)%50 == 0 {
			fmt.Fprintf(os.Stderr, "%d kills\n", i+1)
		}
	}
	fmt.Printf("%d kills in %s; every resume ended in the uninterrupted run's parameters\n", kills, time.Since(began).Round(time.Second))
	return table(jobs)
}

func table(jobs []*job) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "configuration\tkills\taimed at saves\tamid a save or removal\tbefore the first checkpoint\tsteps lost, mean\tmost\t")
	for _, j := range jobs {
		c := j.count
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%.1f\t%d\t\n", j.name, c.kills, c.aimed, c.amid, c.early, float64(c.lost)/float64(max(c.kills, 1)), c.most)
	}
	return w.Flush()
}

const (
	steps     = 30
	saveEvery = 3
)

// job is a configuration, its uninterrupted end and what became of its kills.
type job struct {
	name, work, binary string
	ranks              int // processes of a launch; 0: one process for all
	args               []string
	sha                string
	length             time.Duration // of the uninterrupted run
	serial             int
	count              struct{ kills, aimed, amid, early, lost, most int }
}

// configurations are small runs whose states rest and move differently.
var configurations = []struct{ name, flags string }{
	{"ZeRO-3, 2 ranks", "--ranks 2 --zero 3"},
	{"ZeRO-1, accumulation, dropout", "--ranks 2 --zero 1 --accum 2 --dropout 0.1"},
	{"host offload, shuffled, clip", "--ranks 2 --offload optimizer=host --order shuffled --clip 1"},
	{"disk tier", "--ranks 1 --offload optimizer=disk --disk DISK"},
	{"LAMB, frozen", "--ranks 3 --optimizer lamb --freeze wte.*,h.0.*"},
}

// files writes model and data, and returns the beginning of a command that trains on
// them.
func files(work string) ([]string, error) {
	model, text := filepath.Join(work, "model"), filepath.Join(work, "text.txt")
	config := `{"model_type":"gpt2","n_layer":2,"n_head":2,"n_embd":32,"vocab_size":256,"n_positions":32}`
	words := strings.Repeat("a run that is killed goes on where its last checkpoint stands; ", 200)
	err := errors.Join(os.Mkdir(model, 0o755), os.WriteFile(filepath.Join(model, "config.json"), []byte(config), 0o644), os.WriteFile(text, []byte(words), 0o644))
	return []string{"train", "--model", model, "--data", text, "--seq", "16"}, err
}

// prepare runs each configuration undisturbed.
func prepare(ctx context.Context, work, binary string, ranks bool) ([]*job, error) {
	common, err := files(work)
	if err != nil {
		return nil, err
	}
	var jobs []*job
	common = append(common, "--batch", "2", "--steps", fmt.Sprint(steps))
	for _, c := range configurations {
		flags := strings.Fields(strings.ReplaceAll(c.flags, "DISK", filepath.Join(work, "disk")))
		jobs = append(jobs, &job{name: c.name, args: slices.Concat(common, flags)})
	}
	if ranks {
		jobs = nil
		for _, c := range launched {
			args := slices.Concat([]string{"launch", "-n", fmt.Sprint(c.ranks), "--"}, common, strings.Fields(c.flags))
			jobs = append(jobs, &job{name: c.name, ranks: c.ranks, args: args})
		}
	}
	for _, j := range jobs {
		j.work, j.binary = work, binary
		began := time.Now()
		if j.sha, err = j.end(ctx, filepath.Join(work, "whole")); err != nil {
			return nil, fmt.Errorf("%s, undisturbed: %w", j.name, err)
		}
		j.length = time.Since(began)
	}
	return jobs, nil
}

// start begins the job, resumed where it can be, with its checkpoints in dir.
func (j *job) start(ctx context.Context, dir string) (*exec.Cmd, *strings.Builder, error) {
	args := append(append([]string(nil), j.args...), "--checkpoint", dir, "--save-every", fmt.Sprint(saveEvery), "--keep", "2", "--resume", "--metrics", metrics(dir))
	cmd := exec.CommandContext(ctx, j.binary, args...)
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	return cmd, out, cmd.Start()
}

// end runs the job to its end, removes dir and returns the parameters' SHA-256.
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
	return sha[:64], errors.Join(clean(dir), os.RemoveAll(dir), os.Remove(metrics(dir)))
}

// clean sees that a run that ended left whole checkpoints and nothing half.
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

// trial kills a run once, looks at what it left, and resumes it.
func (j *job) trial(ctx context.Context, r *rand.Rand, aimed bool) error {
	for range 100 {
		j.serial++
		dir := filepath.Join(j.work, fmt.Sprintf("ck-%p-%d", j, j.serial))
		killed, amid, err := j.kill(ctx, r, dir, aimed)
		if err != nil {
			return err
		}
		if !killed { // it had ended by then
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			continue
		}
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
		j.note(aimed, amid, at)
		return nil
	}
	return errors.New("100 runs ended before they were killed")
}

func (j *job) note(aimed, amid bool, at progress) {
	c := &j.count
	c.kills++
	if aimed {
		c.aimed++
	}
	if amid {
		c.amid++
	}
	if at.step == 0 {
		c.early++
	}
	lost := at.seen - at.step
	c.lost += lost
	c.most = max(c.most, lost)
}

// kill starts the job and kills it: at a random moment of its length, or, aimed,
// shortly after a save or a removal began. amid says that one was under way.
func (j *job) kill(ctx context.Context, r *rand.Rand, dir string, aimed bool) (killed, amid bool, err error) {
	cmd, out, err := j.start(ctx, dir)
	if err != nil {
		return false, false, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if j.ranks > 0 {
		killed, err = j.killRank(ctx, cmd, out, ended, r, dir, aimed)
		return killed, len(underWay(dir)) > 0, err
	}
	if aimed {
		waitForSave(dir, 1+r.IntN(steps/saveEvery), ended)
		time.Sleep(time.Duration(r.Int64N(int64(4 * time.Millisecond))))
	} else {
		time.Sleep(time.Duration(r.Int64N(int64(j.length))))
	}
	if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return false, false, err
	}
	err = <-ended
	if err == nil {
		return false, false, nil
	}
	if cmd.ProcessState.ExitCode() != -1 { // not by a signal
		return false, false, fmt.Errorf("it ended by itself: %w: %s", err, out)
	}
	return true, len(underWay(dir)) > 0, nil
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

// waitForSave returns once the n-th temporary name has shown itself in dir, or the
// run has ended; what ended says is put back.
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
		case <-time.After(50 * time.Microsecond):
		}
	}
}

// progress is how far a killed run had come: the newest checkpoint's step, and the
// last step in its metrics.
type progress struct{ step, seen int }

// newest verifies every checkpoint that a kill left: none may be damaged, and no more
// steps may be lost than lie between three saves: one may be under way beside the steps,
// for which the next one waits.
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

// metrics is the file with a line for each step of the run in dir.
func metrics(dir string) string { return dir + ".jsonl" }
