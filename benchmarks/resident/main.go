//go:build unix

// Command resident compares a run's highest resident memory, as the kernel
// counts it, with what the plan says of it: arenas and what is outside of them,
// over all ranks.
//
//	go run ./benchmarks/resident [-spillway BINARY] [-model NAME] [-only TEXT]
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// cases are train's flags beside those that all share. DIR is a scratch folder,
// kept from case to case.
var cases = []struct{ name, flags string }{
	{"1 rank, stage 0", "--zero 0"},
	{"3 ranks, stage 0", "--ranks 3 --zero 0"},
	{"3 ranks, stage 3", "--ranks 3"},
	{"1 rank, recompute", "--recompute full"},
	{"3 ranks, recompute", "--ranks 3 --recompute full"},
	{"1 rank, optimizer on host", "--offload optimizer=host"},
	{"3 ranks, optimizer on host", "--ranks 3 --offload optimizer=host"},
	{"1 rank, optimizer on disk", "--offload optimizer=disk --disk DIR/disk"},
	{"3 ranks, optimizer on disk", "--ranks 3 --offload optimizer=disk --disk DIR/disk"},
	{"3 ranks, all on disk", "--ranks 3 --offload optimizer=disk,parameters=disk,gradients=disk,activations=disk --disk DIR/disk"},
	{"8 ranks, stage 3", "--ranks 8"},
	{"1 rank, traced", "--trace DIR/trace.json"},
	{"3 ranks, traced", "--ranks 3 --trace DIR/trace.json"},
	{"1 rank, saved", "--checkpoint DIR/checkpoint --keep 1"},
	{"3 ranks, resumed", "--ranks 3 --checkpoint DIR/checkpoint --keep 1 --resume --steps 4"},
	{"1 rank, loaded", "--init DIR/checkpoint/step-00000004"},
	{"1 rank, GPT-2's tokenizer", "--tokenizer gpt2 --data DIR/text.txt"},
	{"2 ranks, held-out data", "--ranks 2 --eval-data DIR/tokens.bin --eval-steps 2"},
}

func main() {
	binary := flag.String("spillway", "", "the program; built if not given")
	model := flag.String("model", "gpt2", "preset or folder")
	only := flag.String("only", "", "run cases whose name contains this")
	flag.Parse()
	if err := run(*binary, *model, *only); err != nil {
		fmt.Fprintln(os.Stderr, "resident:", err)
		os.Exit(1)
	}
}

func run(binary, model, only string) (err error) {
	dir, err := os.MkdirTemp("", "spillway-resident-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if binary == "" {
		binary = filepath.Join(dir, "spillway")
		build := exec.Command("go", "build", "-o", binary, "./cmd/spillway")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			return fmt.Errorf("build: %w", err)
		}
	}
	tokens := make([]byte, 2<<20)
	for i := 0; i < len(tokens); i += 2 {
		tokens[i], tokens[i+1] = byte(i*7), byte(i>>9)%64
	}
	text := strings.Repeat("The plan is the memory that is allocated, byte for byte.\n", 20000)
	err = errors.Join(os.WriteFile(filepath.Join(dir, "tokens.bin"), tokens, 0o644), os.WriteFile(filepath.Join(dir, "text.txt"), []byte(text), 0o644))
	if err != nil {
		return err
	}
	fmt.Println("| run | arenas, MiB | outside by the plan | resident | resident less plan | of 5 % + 64 MiB |")
	fmt.Println("| --- | --- | --- | --- | --- | --- |")
	for _, c := range cases {
		if !strings.Contains(c.name, only) {
			continue
		}
		flags := strings.Fields("--model " + model + " --batch 1 --seq 64 --steps 2 --data DIR/tokens.bin " + c.flags)
		for i := range flags {
			flags[i] = strings.Replace(flags[i], "DIR", dir, 1)
		}
		arenas, outside, err := planned(binary, flags)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		resident, err := measured(binary, flags)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		total := arenas + outside
		over := resident - total
		fmt.Printf("| %s | %.0f | %.0f | %.0f | %+.0f | %.0f %% |\n", c.name, arenas, outside, resident, over, 100*over/(0.05*total+64))
	}
	return nil
}

// planned returns MiB over all ranks of the memory that a process of the CPU
// device takes: device and host.
func planned(binary string, flags []string) (arenas, outside float64, err error) {
	text, err := exec.Command(binary, append([]string{"plan", "--json", "-"}, flags...)...).Output()
	if err != nil {
		return 0, 0, err
	}
	type space struct {
		Peak    float64 `json:"peak_bytes"`
		Outside float64 `json:"outside_bytes"`
	}
	var doc struct {
		Ranks     float64
		Requested struct{ Device, Host space }
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return 0, 0, err
	}
	r := doc.Requested
	scale := doc.Ranks / (1 << 20)
	return (r.Device.Peak + r.Host.Peak) * scale, (r.Device.Outside + r.Host.Outside) * scale, nil
}

// measured runs the training and returns the highest resident memory in MiB.
func measured(binary string, flags []string) (float64, error) {
	cmd := exec.Command(binary, append([]string{"train"}, flags...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	return float64(cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss) / 1024, nil // KiB on Linux
}
