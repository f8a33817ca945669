//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	mostGrowth = 5 << 20 // bytes of resident memory after the first minute
	mostMarks  = 1 << 20 // bytes
)

// use is a process's number of open files and its resident memory.
type use struct {
	files    int
	resident int64
}

// soak runs two jobs that save every step for a long time. One is a process whose metrics are
// scraped. The second rank of the other is killed repeatedly and replaced. The open files and the
// memory of the process, the launcher and each first rank must stay as in the first minute.
func (c *campaign) soak(ctx context.Context) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	addr := "127.0.0.1:" + port
	run := slices.Clip(c.train("--reproducible", "--steps", "100000000", "--save-every", "1", "--keep", "2"))
	alone := append(run, "--ranks", "2", "--checkpoint", c.path("plain"), "--metrics-addr", addr)
	plain, endPlain, err := c.background(c.path("plain.log"), alone...)
	if err != nil {
		return err
	}
	launched := slices.Concat([]string{"launch", "-n", "2", "--restarts", "1000000", "--min-ranks", "1", "--"}, run,
		[]string{"--global-batch", "2", "--checkpoint", c.path("launch")})
	launcher, endLaunch, err := c.background(c.path("launch.log"), launched...)
	if err != nil {
		return errors.Join(err, endPlain())
	}
	ready := func() bool {
		return len(ranksOf(launcher.Process.Pid)) == 2 && len(steps(c.path("launch"))) > 0 && len(steps(c.path("plain"))) > 0
	}
	if !until(ctx, time.Minute, ready) {
		return errors.Join(errors.New("no checkpoints within a minute"), endPlain(), endLaunch())
	}
	base, worst := map[string]use{}, map[string]use{}
	first, final := map[string][]int{}, map[string][]int{} // numbers of open files, at the start and at the end
	began, kills, scrapes, marks := time.Now(), 0, 0, int64(0)
	nextKill, settled := began.Add(10*time.Second), min(time.Minute, c.length/4)
	saved := "" // the newest checkpoint at the last kill; a job without progress between losses ends
	var wrong error
	for ; time.Since(began) < c.length && ctx.Err() == nil && wrong == nil; time.Sleep(250 * time.Millisecond) {
		if resp, err := http.Get("http://" + addr + "/metrics"); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			scrapes++
		}
		for _, dir := range []string{"plain", "launch"} {
			if st, err := os.Stat(c.path(dir, ".spillway-marks")); err == nil {
				marks = max(marks, st.Size())
			}
		}
		now := ranksOf(launcher.Process.Pid)
		for name, pid := range map[string]int{"the process": plain.Process.Pid, "launch": launcher.Process.Pid, "launch's rank 0": now[0]} {
			u, err := useOf(pid)
			if err != nil && name != "launch's rank 0" { // rank 0 ends with its world
				wrong = errors.Join(wrong, fmt.Errorf("%s has ended: %w", name, err))
			}
			w := worst[name]
			worst[name] = use{max(w.files, u.files), max(w.resident, u.resident)}
			whole := name == "the process" || len(now) == 2 // a lost rank had a descriptor
			if at := time.Since(began); err == nil && at < settled {
				base[name] = worst[name]
				if whole {
					first[name] = append(first[name], u.files)
				}
			} else if err == nil && whole && at > c.length-settled {
				final[name] = append(final[name], u.files)
			}
		}
		if newest := last(steps(c.path("launch"))); len(now) == 2 && time.Now().After(nextKill) && newest > saved {
			if syscall.Kill(now[1], syscall.SIGKILL) == nil {
				kills++
			}
			saved = newest
			nextKill = time.Now().Add(10*time.Second + time.Duration(c.random.Int64N(int64(20*time.Second))))
		}
	}
	wrong = errors.Join(wrong, status(endPlain(), 130), status(endLaunch(), 130))
	for name, b := range base {
		wrong = errors.Join(wrong, grown(name, b, worst[name], first[name], final[name]))
	}
	if marks > mostMarks {
		wrong = errors.Join(wrong, fmt.Errorf("the marks had %d bytes", marks))
	}
	for _, dir := range []string{"plain", "launch"} {
		if r := c.spillway(ctx, "ckpt", "verify", c.path(dir)); r.status != 0 && ctx.Err() == nil {
			wrong = errors.Join(wrong, fmt.Errorf("ckpt verify: %s", short(r.out+r.err)))
		}
	}
	fmt.Printf("%v, the last checkpoints are %s and %s; %d ranks lost and replaced, %d scrapes, marks at most %d bytes\n",
		time.Since(began).Round(time.Second), last(steps(c.path("plain"))), last(steps(c.path("launch"))), kills, scrapes, marks)
	return wrong
}

// grown prints the numbers of open files. It fails if more are open at the end than in the first
// minute, or if memory ever rose by more than mostGrowth.
func grown(name string, base, worst use, first, final []int) error {
	if len(first) == 0 || len(final) == 0 {
		return nil
	}
	// More files are open while ranks are replaced; a starting rank 0 has few.
	before, after := slices.Min(first), slices.Min(final)
	fmt.Printf("%s: %d files open in the first minute, %d in the last, %d at most; resident %.1f MiB, %+.1f MiB at most\n",
		name, before, after, worst.files, float64(base.resident)/(1<<20), float64(worst.resident-base.resident)/(1<<20))
	if after > before && name != "launch's rank 0" || worst.resident > base.resident+mostGrowth {
		return fmt.Errorf("%s grows", name)
	}
	return nil
}

func last(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return names[len(names)-1]
}

// status returns an error unless a command ended with the status want.
func status(err error, want int) error {
	if code, ok := err.(interface{ ExitCode() int }); ok && code.ExitCode() == want {
		return nil
	}
	return fmt.Errorf("it did not end with status %d: %w", want, errors.Join(err, errNotOtherwise))
}

var errNotOtherwise = errors.New("see the log")

// steps returns the names of a folder's checkpoints.
func steps(dir string) []string {
	names, _ := filepath.Glob(filepath.Join(dir, "step-*")) // the pattern is valid
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	return names
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

// ranksOf returns the processes of a launcher by rank.
func ranksOf(launcher int) map[int]int {
	all := map[int]int{}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", launcher))
	for _, t := range tasks {
		text, _ := os.ReadFile(t) // a thread that has ended has no children
		for _, f := range strings.Fields(string(text)) {
			pid, _ := strconv.Atoi(f)
			environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
			for _, v := range strings.Split(string(environ), "\x00") {
				name, value, _ := strings.Cut(v, "=")
				if rank, err := strconv.Atoi(value); err == nil && strings.HasPrefix(name, "SPILLWAY") && strings.HasSuffix(name, "_RANK") {
					all[rank] = pid
				}
			}
		}
	}
	return all
}

// useOf returns a process's number of open files and its resident memory.
func useOf(pid int) (u use, err error) {
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return u, err
	}
	u.files = len(files)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	line, _, _ := strings.Cut(rest, "kB")
	kib, aerr := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	u.resident = kib << 10
	return u, errors.Join(err, aerr)
}
