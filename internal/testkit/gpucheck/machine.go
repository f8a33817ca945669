package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/images"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// gpu describes the first card and holds the number of cards.
type gpu struct {
	count  int
	name   string
	memory int64
	uuid   [16]byte
}

// look detects the machine's devices and libraries. It returns an error if something is missing
// without which nothing can run.
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
		meet := func(add func(name, format string, args ...any)) error { return b.lookCUDA(ctx, add) }
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

// wantTorch waits for the result of lookTorch.
func (b *bundle) wantTorch(doc *document) {
	if b.torchIs == nil {
		return
	}
	found := <-b.torchIs
	b.torchIs = nil
	doc.Machine = append(doc.Machine, fact{"PyTorch", found.says})
	b.python = found.python
}

// torchFound is a Python that has torch, and a remark about it.
type torchFound struct{ python, says string }

// lookLimit is the time limit for opening the driver and NVIDIA's libraries.
var lookLimit = 30 * time.Second

// lookCUDA runs a child process, because a driver call that hangs must not block this process.
func (b *bundle) lookCUDA(ctx context.Context, add func(name, format string, args ...any)) error {
	o := b.within(ctx, lookLimit, "look", b.work, nil, b.self, "-child", "look")
	for line := range bytes.Lines(o.out) {
		var f seen
		if json.Unmarshal(line, &f) != nil {
			continue
		}
		if f.GPU != nil {
			b.gpu = &gpu{f.GPU.Count, f.GPU.Name, f.GPU.Memory, f.GPU.UUID}
		}
		if f.Name != "" {
			add(f.Name, "%s", f.Value)
		}
	}
	if o.status != 0 {
		return fmt.Errorf("no GPU: the look at it %s", o.ended())
	}
	return nil
}

// seen is a line of output of lookChild.
type seen struct {
	fact
	GPU *struct {
		Count  int
		Name   string
		Memory int64
		UUID   [16]byte
	} `json:",omitempty"`
}

// lookChild reports the driver and libraries. Without NVRTC or cuBLASLt the driver can still be
// tested.
func lookChild(w io.Writer, api driver.API) error {
	lines := json.NewEncoder(w)
	say := func(name, format string, args ...any) {
		_ = lines.Encode(seen{fact: fact{name, fmt.Sprintf(format, args...)}}) // a closed pipe has no reader
	}
	devices, err := api.Devices()
	if err != nil {
		return err
	}
	if len(devices) == 0 {
		return errors.New("the driver knows of no GPU")
	}
	var first seen
	first.GPU = &struct {
		Count  int
		Name   string
		Memory int64
		UUID   [16]byte
	}{len(devices), devices[0].Name, devices[0].Memory, devices[0].UUID}
	_ = lines.Encode(first)
	for _, d := range devices {
		say("GPU "+strconv.Itoa(d.Ordinal), "%s, compute capability %d.%d, %.1f GiB, %d multiprocessors", d.Name, d.Major, d.Minor, float64(d.Memory)/(1<<30), d.SMs)
	}
	version, err := api.Version()
	if err != nil {
		return err
	}
	say("driver's CUDA", "%d.%d", version/1000, version%1000/10)
	if c, err := nvrtc.Open(nvrtc.Options{Cache: "-", Driver: version}); err != nil {
		say("NVRTC", "%v", err)
	} else {
		say("NVRTC", "%s (%s)", c.Version(), c.Path())
	}
	if images.There() {
		say("kernels", "embedded in this build")
	}
	// cuBLASLt needs a context. The locked thread ends with this process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	held, err := api.Retain(devices[0].Ordinal)
	if err == nil {
		err = api.SetCurrent(held)
	}
	if err != nil {
		return err
	}
	if lt, err := blas.Open(version); err != nil {
		say("cuBLASLt", "%v", err)
	} else {
		say("cuBLASLt", "%d (%s)", lt.Version(), lt.Path())
		_ = lt.Close()
	}
	return api.Release(devices[0].Ordinal)
}

// lookTorch looks for a Python that has torch, with CUDA support if the device is cuda.
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
