//go:build linux

// Command campaigns tests a run's checkpoints and their surroundings for a long time: readers
// concurrent with a writer, connections to the metrics page, links and mounts in the folder,
// failing system calls, and a soak test. See README.md.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
)

// campaign has the settings of all campaigns.
type campaign struct {
	work, binary string
	seed         uint64
	random       *rand.Rand
	n            int           // number of trials; 0: the campaign's default
	length       time.Duration // of the soak
}

var all = map[string]struct {
	trials int
	run    func(*campaign, context.Context) error
}{
	"readers":     {2000, (*campaign).readers},
	"connections": {20000, (*campaign).connections},
	"folders":     {20, (*campaign).folders},
	"calls":       {1500, (*campaign).calls},
	"soak":        {0, (*campaign).soak},
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == sinkCommand {
		serveSink()
	}
	c := &campaign{}
	flag.StringVar(&c.binary, "binary", "", "the spillway `FILE` to try (default: built from this tree)")
	flag.Uint64Var(&c.seed, "seed", 0, "of what is random; 0: another each time")
	flag.IntVar(&c.n, "n", 0, "trials (default: the campaign's)")
	flag.DurationVar(&c.length, "length", 30*time.Minute, "of the soak")
	dir := flag.String("dir", "", "`DIR` to work in (default: the system's temporary folder)")
	flag.Parse()
	chosen, ok := all[flag.Arg(0)]
	if !ok || flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "campaigns: give one of readers, connections, folders, calls, soak")
		os.Exit(1)
	}
	if c.n == 0 {
		c.n = chosen.trials
	}
	if c.seed == 0 {
		c.seed = rand.Uint64()
	}
	c.random = rand.New(rand.NewPCG(c.seed, 0))
	fmt.Printf("%s: seed %d\n", flag.Arg(0), c.seed)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := c.start(ctx, *dir, chosen.run); err != nil {
		fmt.Fprintln(os.Stderr, "campaigns:", err)
		os.Exit(1)
	}
}

// start works in a folder below dir, which is kept if something failed.
func (c *campaign) start(ctx context.Context, dir string, run func(*campaign, context.Context) error) (err error) {
	if c.work, err = os.MkdirTemp(dir, "spillway-campaign-"); err != nil {
		return err
	}
	if c.binary, err = bench.Spillway(c.binary, c.work); err != nil {
		return err
	}
	config := `{"model_type":"gpt2","n_layer":2,"n_head":2,"n_embd":32,"vocab_size":256,"n_positions":32}`
	text := strings.Repeat("a reader beside a writer sees whole checkpoints only; ", 60)
	err = errors.Join(os.Mkdir(c.path("model"), 0o755),
		os.WriteFile(c.path("model", "config.json"), []byte(config), 0o644),
		os.WriteFile(c.path("text.txt"), []byte(text), 0o644))
	if err == nil {
		err = run(c, ctx)
	}
	if err != nil {
		return fmt.Errorf("%w\nwhat there was is left in %s", err, c.work)
	}
	return os.RemoveAll(c.work)
}

func (c *campaign) path(names ...string) string {
	return filepath.Join(append([]string{c.work}, names...)...)
}

// train returns a command that trains, with further arguments.
func (c *campaign) train(more ...string) []string {
	return append([]string{"train", "--model", c.path("model"), "--data", c.path("text.txt"), "--batch", "1", "--seq", "16"}, more...)
}

// ran describes a command that has ended.
type ran struct {
	status      int // -1: by a signal
	out, err    string
	late        bool
	took        time.Duration
	interrupted bool
}

// run runs a command until it ends or is late. If it is late, its process group writes the stacks
// of its goroutines, and is killed.
func (c *campaign) run(ctx context.Context, limit time.Duration, command ...string) ran {
	var out, errs bytes.Buffer
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.work, &out, &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 5 * time.Second
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return ran{status: -1, err: err.Error()}
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the status describes the end
		close(ended)
	}()
	r := ran{}
	select {
	case <-ended:
	case <-time.After(limit):
		r.late = true
	case <-ctx.Done():
		r.interrupted = true
	}
	if r.late {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGQUIT)
		time.Sleep(2 * time.Second)
	}
	if r.late || r.interrupted {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
	}
	r.status, r.out, r.err, r.took = cmd.ProcessState.ExitCode(), out.String(), errs.String(), time.Since(began)
	return r
}

// spillway is run for the program under test.
func (c *campaign) spillway(ctx context.Context, args ...string) ran {
	return c.run(ctx, 5*time.Minute, append([]string{c.binary}, args...)...)
}

// background starts the program with its output in a log, and returns a function that ends it.
func (c *campaign) background(log string, args ...string) (*exec.Cmd, func() error, error) {
	f, err := os.Create(log)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	cmd := exec.Command(c.binary, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.work, f, f
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return cmd, func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM) // the process may have ended
		select {
		case err := <-ended:
			return err
		case <-time.After(2 * time.Minute):
			_ = cmd.Process.Kill()
			return errors.New("it did not end within 2 minutes of SIGTERM")
		}
	}, nil
}

// until waits for a condition, and returns false if limit passes first.
func until(ctx context.Context, limit time.Duration, is func() bool) bool {
	for late := time.Now().Add(limit); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(late) || ctx.Err() != nil {
			return false
		}
	}
	return true
}

// sha returns the SHA-256 of the parameters from a run's last lines.
func sha(out string) string {
	_, rest, _ := strings.Cut(out, "SHA-256: ")
	line, _, _ := strings.Cut(rest, "\n")
	return line
}

// short shortens a text for a message.
func short(text string) string {
	text = strings.TrimSpace(text)
	if len(text) > 400 {
		text = "…" + text[len(text)-400:]
	}
	return text
}
