//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// writerSteps is the number of steps of a writer. The reference run's folder has a checkpoint of
// each.
const writerSteps = 2500

var stepName = regexp.MustCompile(`step-\d{8}`)

// reader is a command that reads a checkpoint or a folder of them.
type reader struct {
	name string
	args func(c *campaign, of string, i int) []string
	// said returns the results that depend on the step, from the output and the written files.
	said func(c *campaign, r ran, i int) string
}

var readerCommands = []reader{
	{"generate", func(c *campaign, of string, _ int) []string {
		return []string{"generate", "--model", of, "--prompt", "a reader", "--tokens", "12", "--temperature", "0"}
	}, func(_ *campaign, r ran, _ int) string { return r.out }},
	{"eval", func(c *campaign, of string, _ int) []string {
		return []string{"eval", "--model", of, "--data", c.path("text.txt"), "--seq", "16", "--json", "-"}
	}, func(_ *campaign, r ran, _ int) string {
		var e struct{ Loss float64 }
		if err := json.Unmarshal([]byte(r.out), &e); err != nil {
			return err.Error()
		}
		return fmt.Sprint(e.Loss)
	}},
	{"ckpt verify", func(_ *campaign, of string, _ int) []string { return []string{"ckpt", "verify", of} },
		func(_ *campaign, r ran, _ int) string { return "" }},
	{"ckpt inspect", func(_ *campaign, of string, _ int) []string { return []string{"ckpt", "inspect", of} },
		func(_ *campaign, r ran, _ int) string { return "" }},
	{"ckpt export", func(c *campaign, of string, i int) []string {
		return []string{"ckpt", "export", of, "--to", c.path(fmt.Sprint("export-", i))}
	}, func(c *campaign, _ ran, i int) string {
		text, err := os.ReadFile(c.path(fmt.Sprint("export-", i), "model.safetensors"))
		if err != nil {
			return err.Error()
		}
		return string(text)
	}},
}

// readers calls the commands that read a checkpoint while a run saves every step and keeps one. It
// compares each result with that for the same step of a run that keeps all.
func (c *campaign) readers(ctx context.Context) error {
	every := c.train("--steps", fmt.Sprint(writerSteps), "--lr", "1e-4", "--save-every", "1")
	if r := c.spillway(ctx, append(every[:len(every):len(every)], "--checkpoint", c.path("all"))...); r.status != 0 {
		return fmt.Errorf("the reference run: %s", short(r.err))
	}
	var end func() error
	dir, life := "", 0
	defer func() {
		if end != nil {
			_ = end() // the writer is no longer needed
		}
	}()
	near := fmt.Sprintf("step-%08d", writerSteps-200)
	good, busy, failures := 0, 0, []string{}
	counts := map[string]int{}
	for i := 0; i < c.n && ctx.Err() == nil; i++ {
		if names := steps(dir); dir == "" || slices.Max(append(names, "")) >= near {
			if end != nil {
				_ = end() // the writer has ended, or soon will
				if err := os.RemoveAll(dir); err != nil {
					return err
				}
			}
			life++
			dir = c.path(fmt.Sprint("writer-", life))
			var err error
			if _, end, err = c.background(c.path("log"), append(every[:len(every):len(every)], "--keep", "1", "--checkpoint", dir)...); err != nil {
				return err
			}
			if !until(ctx, time.Minute, func() bool { return len(steps(dir)) > 0 }) {
				return errors.New("the writer has no checkpoint after a minute")
			}
		}
		how := readerCommands[c.random.IntN(len(readerCommands))]
		r := c.spillway(ctx, how.args(c, dir, i)...)
		err := c.compare(ctx, how, r, i)
		counts[how.name]++
		switch {
		case err == nil:
			good++
		case strings.Contains(r.err, "is busy: for 2s"):
			busy++
		default:
			failures = append(failures, fmt.Sprintf("%s: %v", how.name, err))
			fmt.Println("WRONG", failures[len(failures)-1])
		}
		if (i+1)%200 == 0 {
			fmt.Printf("%d calls: %d right, %d busy, %d wrong; %d writers\n", i+1, good, busy, len(failures), life)
		}
	}
	fmt.Printf("%d of %d calls right, %d busy after 2 seconds, %d wrong; %d writers; %v\n", good, c.n, busy, len(failures), life, counts)
	if len(failures) > 0 || good*100 < c.n*99 {
		return errors.New("too few calls were right")
	}
	return nil
}

// compare compares a command's result with the result for the same step of the reference run.
func (c *campaign) compare(ctx context.Context, how reader, r ran, i int) error {
	if r.status != 0 || strings.Contains(r.err+r.out, "damaged") {
		return fmt.Errorf("status %d: %s", r.status, short(r.err+r.out))
	}
	name := stepName.FindString(r.err + r.out)
	if name == "" {
		return fmt.Errorf("it names no step: %s", short(r.err+r.out))
	}
	got := how.said(c, r, i)
	_ = os.RemoveAll(c.path(fmt.Sprint("export-", i))) // most commands write none
	if got == "" {
		return nil // no part of the result depends on the step
	}
	other := c.spillway(ctx, how.args(c, filepath.Join(c.path("all"), name), i)...)
	want := how.said(c, other, i)
	_ = os.RemoveAll(c.path(fmt.Sprint("export-", i)))
	if other.status != 0 || got != want {
		return fmt.Errorf("%s has another result in the run that keeps all (status %d): %s", name, other.status, short(other.err))
	}
	return nil
}
