package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// gpu is the first card, and how many there are.
type gpu struct {
	count  int
	name   string
	memory int64
	uuid   [16]byte
}

// look finds out what there is. Its error says what is missing without which
// nothing can be run.
func (b *bundle) look(ctx context.Context, doc *document) error {
	add := func(name, format string, args ...any) {
		doc.Machine = append(doc.Machine, fact{name, fmt.Sprintf(format, args...)})
	}
	if _, err := os.Stat(b.program("spillway")); err != nil {
		return fmt.Errorf("the bundle is not whole: %w", err)
	}
	add("host", "%s/%s, %d CPUs", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	if commit, err := os.ReadFile(filepath.Join(b.dir, "commit")); err == nil {
		add("commit", "%s", strings.TrimSpace(string(commit)))
	}
	if b.device == "cuda" {
		meet := b.lookCUDA
		if b.meet != nil {
			meet = b.meet
		}
		if err := meet(add); err != nil {
			return err
		}
	}
	go func() { b.torchIs <- b.lookTorch(ctx) }() // it is slow to import: the first parts need no Python
	return nil
}

// wantTorch waits until it is known whether there is a Python with torch.
func (b *bundle) wantTorch(doc *document) {
	if b.torchIs == nil {
		return
	}
	found := <-b.torchIs
	b.torchIs = nil
	doc.Machine = append(doc.Machine, fact{"PyTorch", found.says})
	b.python = found.python
}

// torchFound is a Python that has torch, and what is to be said of it.
type torchFound struct{ python, says string }

func (b *bundle) lookCUDA(add func(name, format string, args ...any)) error {
	api, err := driver.Open()
	if err != nil {
		return fmt.Errorf("no GPU: %w", err)
	}
	devices, err := api.Devices()
	if err != nil {
		return fmt.Errorf("no GPU: %w", err)
	}
	if len(devices) == 0 {
		return errors.New("no GPU: the driver knows of none")
	}
	version, err := api.Version()
	if err != nil {
		return err
	}
	for _, d := range devices {
		add("GPU "+strconv.Itoa(d.Ordinal), "%s, compute capability %d.%d, %.1f GiB, %d multiprocessors", d.Name, d.Major, d.Minor, float64(d.Memory)/(1<<30), d.SMs)
	}
	add("driver's CUDA", "%d.%d", version/1000, version%1000/10)
	b.gpu = &gpu{len(devices), devices[0].Name, devices[0].Memory, devices[0].UUID}
	c, err := nvrtc.Open(nvrtc.Options{Cache: "-"})
	if err != nil {
		return err
	}
	add("NVRTC", "%s (%s)", c.Version(), c.Path())
	// cuBLASLt wants a context; the thread goes away with the process's only use.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	held, err := api.Retain(devices[0].Ordinal)
	if err != nil {
		return err
	}
	defer func() { _ = api.Release(devices[0].Ordinal) }()
	if err := api.SetCurrent(held); err != nil {
		return err
	}
	lt, err := blas.Open()
	if err != nil {
		return err
	}
	add("cuBLASLt", "%d (%s)", lt.Version(), lt.Path())
	return lt.Close()
}

// lookTorch looks for a Python that has torch, with CUDA where that is wanted.
func (b *bundle) lookTorch(ctx context.Context) torchFound {
	ask := "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
	for _, p := range []string{b.python, "python3", "/usr/bin/python3", "/usr/local/bin/python3", "/opt/conda/bin/python3"} {
		if p == "" {
			continue
		}
		limit, cancel := context.WithTimeout(ctx, time.Minute)
		out, err := exec.CommandContext(limit, p, "-c", ask).Output()
		cancel()
		f := strings.Fields(string(out))
		if err == nil && len(f) == 3 && (b.device != "cuda" || f[2] == "True") {
			return torchFound{p, fmt.Sprintf("torch %s, CUDA %s (%s)", f[0], f[1], p)}
		}
	}
	return torchFound{"", "not found: its side is left out"}
}

func (b *bundle) program(name string) string { return filepath.Join(b.dir, name) }
