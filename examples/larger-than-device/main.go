// Command larger-than-device trains a GPT of 105 million parameters, with
// GPT-2's vocabulary, on one rank whose device and host memory are each capped
// at a tenth of the model's states; the rest of them is on disk. It then trains
// it again without caps, and compares: the bits must be the same.
//
//	go run ./examples/larger-than-device [-steps 20] [-disk DIR]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

func main() {
	steps := flag.Int("steps", 20, "optimizer steps of each run")
	disk := flag.String("disk", filepath.Join(os.TempDir(), "spillway-larger-than-device"), "folder of the disk tier")
	model := flag.String("model", "examples/larger-than-device", "folder of config.json")
	flag.Parse()
	if err := run(*steps, *disk, *model); err != nil {
		fmt.Fprintln(os.Stderr, "larger-than-device:", err)
		os.Exit(1)
	}
}

// outcome is what a run leaves to compare.
type outcome struct {
	losses   []float32
	sha      string
	seconds  float64 // of a step, after the first
	peak     [graph.NumSpaces]int64
	planned  [graph.NumSpaces]int64
	resident int64 // highest so far of the process, bytes
}

func run(steps int, disk, model string) error {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	c := spillway.Default()
	c.Model, c.Tokenizer = model, "gpt2"
	c.Data, c.DataGlob = filepath.Join(strings.TrimSpace(string(root)), "src", "net", "http"), "*.go"
	c.Batch, c.Seq, c.Steps, c.LR, c.Clip = 1, 128, steps, 3e-4, 1

	p, err := spillway.Build(c)
	if err != nil {
		return err
	}
	params := p.Program.ParamElems()
	states := 16 * params // fp32 parameters, gradients and two moments
	capped := c
	capped.DeviceMemory, capped.HostMemory = states/10, states/10
	capped.Recompute, capped.Prefetch, capped.Disk = "full", 0, disk
	capped.Offload = "optimizer=disk,parameters=disk,gradients=disk,activations=disk"
	fmt.Printf("%d parameters; states %s; device and host capped at %s each\n", params, plan.Bytes(states), plan.Bytes(states/10))

	small, err := train(capped)
	if err != nil {
		return fmt.Errorf("capped run: %w", err)
	}
	free, err := train(c)
	if err != nil {
		return fmt.Errorf("uncapped run: %w", err)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "run\tdevice planned, touched\thost planned, touched\tdisk planned, touched\tresident\tstep\tlast loss")
	for _, r := range []struct {
		name string
		o    outcome
	}{{"capped", small}, {"uncapped", free}} {
		fmt.Fprintf(w, "%s\t", r.name)
		for s := range graph.NumSpaces {
			fmt.Fprintf(w, "%s, %s\t", plan.Bytes(r.o.planned[s]), plan.Bytes(r.o.peak[s]))
		}
		fmt.Fprintf(w, "%s\t%.2f s\t%v\n", plan.Bytes(r.o.resident), r.o.seconds, r.o.losses[len(r.o.losses)-1])
	}
	w.Flush()
	fmt.Printf("time of a step: %.2f × the uncapped run's\n", small.seconds/free.seconds)
	for i := range free.losses {
		if small.losses[i] != free.losses[i] {
			return fmt.Errorf("step %d: loss %v capped, %v uncapped", i+1, small.losses[i], free.losses[i])
		}
	}
	if small.sha != free.sha {
		return fmt.Errorf("parameters differ: SHA-256 %s capped, %s uncapped", small.sha, free.sha)
	}
	fmt.Println("the same bits: every loss, and the parameters' SHA-256", free.sha)
	return nil
}

func train(c spillway.Config) (o outcome, err error) {
	ctx := context.Background()
	t, err := spillway.New(ctx, c)
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	began := time.Now()
	err = t.Run(ctx, func(r spillway.StepResult) error {
		o.losses = append(o.losses, r.Loss)
		for s := range graph.NumSpaces {
			o.peak[s], o.planned[s] = r.Peak[s][0], r.Planned[s][0]
		}
		if r.Step == 1 {
			began = time.Now()
		}
		fmt.Printf("step %d  loss %.4f  %.2f s\n", r.Step, r.Loss, r.Seconds)
		return nil
	})
	if err != nil {
		return o, err
	}
	o.seconds = time.Since(began).Seconds() / float64(max(len(o.losses)-1, 1))
	o.resident = residentPeak()
	o.sha, err = t.ParamsSHA256()
	return o, err
}

// residentPeak returns the process's highest resident memory so far, in bytes;
// 0 where the system does not tell.
func residentPeak() int64 {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(text), "\n") {
		var kib int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	return 0
}
