// Command larger-than-device trains a GPT of 105 million parameters, with GPT-2's vocabulary, on
// one rank. Its device and host memory are each capped at a tenth of the model's states; the other
// states are on disk. It trains in layer order, which reads each layer twice a step, and in micro
// order, which reads it twice a micro-batch. Then it trains again without caps and compares: for
// each order the bits must be the same.
//
//	go run ./examples/larger-than-device [-steps 20] [-accum 4] [-disk DIR]
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
	accum := flag.Int("accum", 4, "micro-batches of a step")
	disk := flag.String("disk", filepath.Join(os.TempDir(), "spillway-larger-than-device"), "folder of the disk tier")
	model := flag.String("model", "examples/larger-than-device", "folder of config.json")
	flag.Parse()
	if err := run(*steps, *accum, *disk, *model); err != nil {
		fmt.Fprintln(os.Stderr, "larger-than-device:", err)
		os.Exit(1)
	}
}

// outcome has the results of a run that are compared.
type outcome struct {
	losses   []float32
	sha      string
	seconds  float64 // of a step, after the first
	peak     [graph.NumSpaces]int64
	planned  [graph.NumSpaces]int64
	read     int64 // of a step from disk, bytes
	resident int64 // highest so far of the process, bytes
}

func run(steps, accum int, disk, model string) error {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	c := spillway.Default()
	c.Model, c.Tokenizer = model, "gpt2"
	c.Data, c.DataGlob = filepath.Join(strings.TrimSpace(string(root)), "src", "net", "http"), "*.go"
	c.Batch, c.Seq, c.Steps, c.Accum, c.LR, c.Clip = 1, 128, steps, accum, 3e-4, 1

	p, err := spillway.Build(context.Background(), c)
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

	var of [2][2]outcome // by order, capped and not
	orders := [2]string{"layer", "micro"}
	for i, one := range []spillway.Config{capped, c} { // the resident peak only grows, so the capped run is first
		for k, order := range orders {
			one.AccumOrder = order
			if of[k][i], err = train(one); err != nil {
				return fmt.Errorf("%s run in %s order: %w", names[i], order, err)
			}
		}
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "run\torder\tdevice planned, touched\thost planned, touched\tdisk planned, touched\tread a step\tresident\tstep\tlast loss")
	for k, order := range orders {
		for i, o := range of[k] {
			fmt.Fprintf(w, "%s\t%s\t", names[i], order)
			for s := range graph.NumSpaces {
				fmt.Fprintf(w, "%s, %s\t", plan.Bytes(o.planned[s]), plan.Bytes(o.peak[s]))
			}
			fmt.Fprintf(w, "%s\t%s\t%.2f s\t%v\n", plan.Bytes(o.read), plan.Bytes(o.resident), o.seconds, o.losses[len(o.losses)-1])
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	layer, micro := &of[0], &of[1]
	fmt.Printf("time of a capped step: %.2f × the uncapped run's in layer order, %.2f × in micro order; micro / layer %.2f\n",
		layer[0].seconds/layer[1].seconds, micro[0].seconds/micro[1].seconds, micro[0].seconds/layer[0].seconds)
	for k, order := range orders {
		if err := same(&of[k][0], &of[k][1]); err != nil {
			return fmt.Errorf("%s order: %w", order, err)
		}
		fmt.Printf("the same bits in %s order: every loss, and the parameters' SHA-256 %s\n", order, of[k][0].sha)
	}
	fmt.Println("the orders differ in the last bits: the head is tied to the embedding, whose gradient layer order sums use by use")
	return nil
}

// names of a run with caps and of one without.
var names = [2]string{"capped", "uncapped"}

// same returns an error that says where two runs differ.
func same(capped, free *outcome) error {
	for i := range free.losses {
		if capped.losses[i] != free.losses[i] {
			return fmt.Errorf("step %d: loss %v capped, %v uncapped", i+1, capped.losses[i], free.losses[i])
		}
	}
	if capped.sha != free.sha {
		return fmt.Errorf("parameters differ: SHA-256 %s capped, %s uncapped", capped.sha, free.sha)
	}
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
		o.losses, o.read = append(o.losses, r.Loss), r.DiskRead
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

// residentPeak returns the process's highest resident memory so far, in bytes; 0 if it is unknown.
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
