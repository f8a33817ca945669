//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// failing are the system calls of a run and the errors that they may give. close is left out:
// strace would leave the file open, which Linux never does.
var failing = []struct {
	call, errors string
	again        bool // the call may also fail from some time on, not just once
}{
	{"write", "EIO ENOSPC EPIPE EINTR", true},
	{"pwrite64", "EIO ENOSPC EINTR", true},
	{"fsync", "EIO ENOSPC EINTR", true},
	{"openat", "EIO EMFILE ESTALE EACCES ENOSPC", true},
	{"openat2", "EIO EMFILE ESTALE ENOSYS", true},
	{"renameat2", "EIO EINVAL ENOSPC EXDEV", true},
	{"renameat", "EIO ESTALE", true},
	{"mkdirat", "EIO ENOSPC", true},
	{"unlinkat", "EIO EBUSY ESTALE", true},
	{"ftruncate", "EIO", true},
	{"fallocate", "EIO ENOSPC EOPNOTSUPP EINTR", true},
	{"flock", "ENOLCK EIO EINTR", true},
	{"getdents64", "EIO ESTALE", true},
	{"newfstatat", "EIO ESTALE", true},
	{"pread64", "EIO ESTALE", true},
	{"memfd_create", "ENOMEM EPERM", true},
	{"fstatfs", "EIO", true},
	{"sched_setaffinity", "EINVAL", true},
	{"epoll_ctl", "ENOMEM", true},
	{"pipe2", "EMFILE", true},
	{"io_uring_setup", "EPERM", true},
	{"mmap", "ENOMEM", false},
	{"munmap", "EINVAL", false},
	{"madvise", "ENOMEM EINVAL", false},
	{"fstat", "EIO ESTALE", false},
	{"read", "EIO ESTALE EINTR", false},
	{"clone3", "EAGAIN", false},
	{"clone", "EAGAIN", false},
	{"futex", "EINTR", false},
	{"fcntl", "EIO", false},
	{"getrandom", "EAGAIN", false},
}

// inRuntime are calls of Go's runtime. If one fails there, the process ends with the runtime's
// report.
var inRuntime = []string{"mmap", "munmap", "madvise", "clone", "clone3", "futex", "epoll_ctl", "pipe2", "read", "fcntl", "getrandom"}

const callTimeout = 5 * time.Second

// calls makes a system call of a run fail, resumes the run, and compares its result with a run in
// which nothing failed.
func (c *campaign) calls(ctx context.Context) error {
	if _, err := exec.LookPath("strace"); err != nil {
		return err
	}
	common := c.train("--steps", "8", "--save-every", "2", "--keep", "2", "--timeout", callTimeout.String())
	launch := append([]string{"launch", "-n", "2", "--"}, common...)
	ways := []struct {
		name string
		args []string
	}{
		{"plain", append(common[:len(common):len(common)], "--ranks", "2")},
		{"async save", append(common[:len(common):len(common)], "--async-save", "on")},
		{"disk tier", append(common[:len(common):len(common)], "--offload", "optimizer=disk", "--disk", c.path("tier")+":64MiB")},
		{"two ranks", launch},
	}
	want, limit := map[string]string{}, 0*time.Second
	for _, w := range ways {
		r := c.spillway(ctx, append(w.args[:len(w.args):len(w.args)], "--checkpoint", c.path("whole-"+w.name))...)
		if want[w.name] = sha(r.out); r.status != 0 || want[w.name] == "" {
			return fmt.Errorf("%s, undisturbed: status %d: %s", w.name, r.status, short(r.err))
		}
		limit = max(limit, r.took)
	}
	limit = callTimeout + 5*time.Second + 10*limit // a busy machine is sometimes slower
	statuses, failed, slow, longest, done := map[string]int{}, 0, 0, 0*time.Second, 0
	for ; done < c.n && ctx.Err() == nil; done++ {
		w, f := ways[c.random.IntN(len(ways))], failing[c.random.IntN(len(failing))]
		kinds := strings.Fields(f.errors)
		act := "error=" + kinds[c.random.IntN(len(kinds))]
		if c.random.IntN(6) == 0 {
			act = "signal=KILL"
		}
		most := []int{1, 3, 12, 80}[c.random.IntN(4)]
		when := fmt.Sprint(1 + c.random.IntN(most))
		if f.again && c.random.IntN(3) == 0 && act != "signal=KILL" && act != "error=EINTR" { // signals do not interrupt every call
			when += "+"
		}
		dir := c.path("ck")
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		args := append(w.args[:len(w.args):len(w.args)], "--checkpoint", dir)
		inject := fmt.Sprintf("%s:%s:when=%s", f.call, act, when)
		strace := []string{"strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", "trace=" + f.call, "-e", "inject=" + inject}
		command := slices.Concat(strace, []string{c.binary}, args)
		r := c.run(ctx, limit, command...)
		if r.late { // the machine may have been busy: run again when it is not
			slow++
			fmt.Printf("late %d: %s: %s\n", done, w.name, inject)
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			quiet(ctx, 10*time.Minute)
			if r = c.run(ctx, limit, command...); r.late {
				if err := os.WriteFile(c.path(fmt.Sprint("late-", done)), []byte(r.out+r.err), 0o644); err != nil {
					return err
				}
			}
		}
		if r.interrupted {
			break
		}
		longest = max(longest, r.took)
		what, err := c.judge(ctx, r, f.call, act, dir, args, want[w.name])
		statuses[what]++
		if err != nil && ctx.Err() == nil {
			failed++
			fmt.Printf("FAULT %d: %s: %s: %v | %s\n", done, w.name, inject, err, strings.ReplaceAll(short(r.err+r.out), "\n", " / "))
		}
		if (done+1)%50 == 0 {
			fmt.Printf("%d calls failed on purpose, %d times wrong, longest %v, %v\n", done+1, failed, longest.Round(time.Millisecond), statuses)
		}
	}
	fmt.Printf("%d faults, %d wrong, %d late and tried again on a quiet machine; longest %v (limit %v); ends: %v\n",
		done, failed, slow, longest.Round(time.Millisecond), limit.Round(time.Second), statuses)
	if failed > 0 {
		return fmt.Errorf("%d of %d faults ended wrong", failed, done)
	}
	return nil
}

// quiet waits until the load is at most the number of processors, but no longer than limit.
func quiet(ctx context.Context, limit time.Duration) {
	until(ctx, limit, func() bool {
		text, err := os.ReadFile("/proc/loadavg")
		load := float64(runtime.NumCPU())
		_, serr := fmt.Sscan(string(text), &load)
		return err != nil || serr != nil || load <= float64(runtime.NumCPU())
	})
}

// judge describes the end of a run in which a call failed, and returns an error if that end is
// wrong.
func (c *campaign) judge(ctx context.Context, r ran, call, act, dir string, args []string, want string) (string, error) {
	what := fmt.Sprint("status ", r.status)
	crashed := strings.Contains(r.err, "goroutine ") || strings.Contains(r.err, "fatal error:")
	var errs []error
	switch {
	case r.late:
		return "late", errors.New("it did not end in time")
	case r.status == 127: // its message depends on the failed call
		what = "the loader ended it"
	case r.status == -1 && r.err == "" && act != "signal=KILL" && (call == "write" || slices.Contains(inRuntime, call)): // it could not report
		what = "Go's runtime ended it"
	case crashed && (slices.Contains(inRuntime, call) || call == "write" && strings.Contains(r.err, "netpoll")): // netpoll wakes threads with write
		what = "Go's runtime ended it"
	case crashed:
		errs = append(errs, errors.New("a report of Go's runtime"))
	case act == "signal=KILL" && (r.status == -1 || r.status == 137 || r.status == 3):
		what = "killed"
	case r.status < 0 || r.status > 3:
		errs = append(errs, fmt.Errorf("status %d", r.status))
	case r.status == 0 && sha(r.out) != want && !strings.HasPrefix(call, "write"): // the failed call may have written the output
		errs = append(errs, fmt.Errorf("status 0 with the parameters %.8s", sha(r.out)))
	}
	if _, err := os.Stat(dir); err == nil {
		_, _, err := checkpoint.Each(filesys.System, dir, func(e checkpoint.Entry, open *checkpoint.Checkpoint) error {
			if open == nil {
				return e.Err
			}
			return open.Verify(ctx)
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("after it: %w", err))
		}
	}
	again := c.spillway(ctx, append(args, "--resume")...)
	if again.status != 0 || sha(again.out) != want {
		errs = append(errs, fmt.Errorf("resumed: status %d, parameters %.8s for %.8s: %s", again.status, sha(again.out), want, short(again.err)))
	}
	left, err := os.ReadDir(dir)
	errs = append(errs, err)
	for _, f := range left {
		if n := f.Name(); !strings.HasPrefix(n, "step-") && n != ".spillway-marks" {
			errs = append(errs, fmt.Errorf("%s is left", n))
		}
	}
	return what, errors.Join(errs...)
}
