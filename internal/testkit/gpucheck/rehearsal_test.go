//go:build linux

package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// bundleOf is a folder as `make gpu` builds it, whose gpucheck is this test's binary: with a
// double of the driver for a GPU, and a spillway that finds none.
func bundleOf(t *testing.T) string {
	self, err := os.Executable()
	require.NoError(t, err)
	dir := t.TempDir()
	to := filepath.Join(dir, "gpucheck")
	if os.Link(self, to) != nil { // another file system
		from, err := os.Open(self)
		require.NoError(t, err)
		defer from.Close()
		f, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
		require.NoError(t, err)
		_, err = io.Copy(f, from)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	script, err := os.ReadFile("run.sh")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "run.sh"), script, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "spillway"), []byte("#!/bin/sh\necho no GPU to train on >&2\nexit 3\n"), 0o755))
	return dir
}

// runSh is the bundle's script, which ends with the test, and what it says.
func runSh(t *testing.T, dir string, flags ...string) (*exec.Cmd, *strings.Builder) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	var said strings.Builder
	cmd := exec.CommandContext(ctx, "sh", append([]string{"run.sh", "-python", "/none"}, flags...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &said, &said
	return cmd, &said
}

// What may go wrong on a card nobody sees beforehand: each time the bundle ends by itself, and
// one archive among at most 8 files has everything up to then.
func TestRehearsals(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler")
	}
	for _, c := range []struct {
		name, mode, only string
		look             time.Duration // limit of the look
		budget           time.Duration
		term             bool     // SIGTERM comes while the kernel runs
		page             []string // what the page says
		contact          []string // calls that the archive has the result of
	}{
		{name: "cuInit hangs", mode: "cuInit", only: "contact", look: long.Or(time.Second, 30*time.Second), budget: time.Minute,
			page: []string{"Nothing was run: no GPU: the look at it did not end within"}},
		{name: "no NVRTC", mode: "no NVRTC", only: "contact,wall", look: 30 * time.Second, budget: time.Minute,
			page:    []string{"- NVRTC: ", "compile sum.cu: NVRTC (CUDA's runtime compiler) was not found", "no GPU to train on"},
			contact: []string{"cuMemcpyHtoDAsync", "compile sum.cu", "cublasLtMatmul, 16 cubed, bf16", "cuDevicePrimaryCtxRelease"}},
		{name: "a kernel never ends", mode: "endless", only: "contact,wall", look: 30 * time.Second, budget: long.Or(10*time.Second, time.Minute),
			page:    []string{`after "a predicate that is set": did not end within`},
			contact: []string{"cuMemcpyHtoDAsync", "cuModuleLoadDataEx"}},
		{name: "TERM", mode: "endless", only: "contact,wall", look: 30 * time.Second, budget: time.Minute, term: true,
			page:    []string{"was ended by a signal"},
			contact: []string{"cuMemcpyHtoDAsync", "cuModuleLoadDataEx"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir, libs, temp := bundleOf(t), t.TempDir(), t.TempDir()
			if c.mode == "cuInit" {
				text, err := exec.Command(cc, "-shared", "-fPIC", "-o", filepath.Join(libs, "libcuda.so.1"), "testdata/libcuda.c").CombinedOutput()
				require.NoError(t, err, "%s", text)
			}
			cmd, said := runSh(t, dir, "-only", c.only, "-budget", c.budget.String())
			cmd.Env = append(os.Environ(), plantedEnv+"="+c.mode, lookLimitEnv+"="+c.look.String(), "SPILLWAY_CUDA_LIBS="+libs, "TMPDIR="+temp)
			require.NoError(t, cmd.Start())
			if c.term {
				began, log := time.Now(), filepath.Join(temp, "gpucheck-*", "logs", "contact.txt")
				require.Eventually(t, func() bool {
					found, _ := filepath.Glob(log)
					text, err := os.ReadFile(strings.Join(found, ""))
					return err == nil && strings.Contains(string(text), "a predicate that is set") || long.On() && time.Since(began) > 6*time.Second
				}, 90*time.Second, 50*time.Millisecond)
				time.Sleep(long.Or(0, max(0, 6*time.Second-time.Since(began))))
				require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			}
			var exit *exec.ExitError
			require.ErrorAs(t, cmd.Wait(), &exit, "%s", said)
			require.Equal(t, 1, exit.ExitCode(), "%s", said)

			out := filepath.Join(dir, "results")
			written, err := os.ReadDir(out)
			require.NoError(t, err)
			require.LessOrEqual(t, len(written), 8)
			files := unpacked(t, out)
			for _, want := range c.page {
				require.Contains(t, string(files["results/results.md"]), want)
			}
			var d document
			require.NoError(t, json.Unmarshal(files["results/results.json"], &d))
			if c.contact == nil {
				require.Contains(t, files, "results/logs/look.txt")
				return
			}
			calls := map[string]bool{}
			for _, row := range d.Parts[0].Table {
				calls[row[0]] = true
			}
			for _, call := range c.contact {
				require.True(t, calls[call], "%s of %v", call, calls)
			}
			require.Contains(t, files, "results/logs/contact.txt")
		})
	}
}

// A child of NVML's that says nothing leaves its part with a line; one that tells is believed.
func TestMemoryIsWatchedByAChild(t *testing.T) {
	b := toolBundle(t)
	b.self = filepath.Join(b.dir, "gpucheck")
	old := lookLimit
	defer func() { lookLimit = old }()
	for script, want := range map[string][2]int64{ // the first writes its lines at once
		"#!/bin/sh\nprintf '1000\\n5000\\n4000\\n'; exec sleep 600\n": {1000, 5000},
		"#!/bin/sh\nexec sleep 600\n":                                 {},
		"#!/bin/sh\necho NVML is not here >&2; exit 1\n":              {},
	} {
		lookLimit = time.Minute
		if want[1] == 0 {
			lookLimit = 200 * time.Millisecond
		}
		require.NoError(t, os.WriteFile(b.self, []byte(script), 0o755))
		watch := b.watchMemory(t.Context())
		before, most, err := watch()
		require.Equal(t, want, [2]int64{before, most})
		require.Equal(t, want[1] == 0, err != nil, script)
	}
	r := &result{}
	r.compareUsed(1<<30+600<<20, step{DevicePlanned: []int64{1 << 30}, Outside: 590 << 20})
	require.Empty(t, r.Status)
	r.compareUsed(1<<30+600<<20, step{DevicePlanned: []int64{1 << 30}, Outside: 200 << 20})
	require.Equal(t, failedStatus, r.Status)
	require.ErrorContains(t, memoryChild(io.Discard, "12"), "want 32 hexadecimal digits")
}
