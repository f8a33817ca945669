// Command resources compiles the GPU's kernels with NVRTC and prints, as Markdown, the resources
// that each needs: registers of a thread, bytes spilled to memory, shared memory of a block. It
// needs no GPU.
//
//	go run ./benchmarks/cuda/resources
package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"

	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// use is the assembler's report about a kernel.
type use struct{ registers, stack, spills, shared int }

var (
	entry    = regexp.MustCompile(`Compiling entry function '(\w+)'`)
	function = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	used     = regexp.MustCompile(`Used (\d+) registers`)
	shared   = regexp.MustCompile(`(\d+) bytes smem`)
)

// parse reads the log of ptxas -v.
func parse(log string, into map[string]use) {
	number := func(s string) int {
		n, _ := strconv.Atoi(s) // digits, or empty
		return n
	}
	at := entry.FindAllStringSubmatchIndex(log, -1)
	for i, m := range at {
		end := len(log)
		if i+1 < len(at) {
			end = at[i+1][0]
		}
		name, text := log[m[2]:m[3]], log[m[0]:end]
		u := into[name]
		for _, f := range function.FindAllStringSubmatch(text, -1) {
			u.stack += number(f[1])
			u.spills += number(f[2]) + number(f[3])
		}
		if f := used.FindStringSubmatch(text); f != nil {
			u.registers = number(f[1])
		}
		if f := shared.FindStringSubmatch(text); f != nil {
			u.shared = number(f[1])
		}
		into[name] = u
	}
}

func run() error {
	c, err := nvrtc.Open(nvrtc.Options{Cache: "-"})
	if err != nil {
		return err
	}
	archs := []string{"sm_80", "sm_90"}
	fmt.Printf("NVRTC %s\n\n", c.Version())
	fmt.Println("| source | kernel | registers | stack, spilled bytes | static shared bytes |")
	fmt.Println("| --- | --- | --- | --- | --- |")
	kernels, spilling := 0, 0
	for _, name := range cuda.Sources() {
		source, err := cuda.Source(name)
		if err != nil {
			return err
		}
		by := map[string]map[string]use{}
		for _, arch := range archs {
			_, log, err := c.Report(name, source, arch)
			if err != nil {
				return err
			}
			by[arch] = map[string]use{}
			parse(log, by[arch])
		}
		for _, k := range slices.SortedFunc(maps.Keys(by[archs[0]]), cmp.Compare) {
			a, b := by[archs[0]][k], by[archs[1]][k]
			fmt.Printf("| %s | %s | %d / %d | %d, %d / %d, %d | %d / %d |\n", name, k, a.registers, b.registers, a.stack, a.spills, b.stack, b.spills, a.shared, b.shared)
			kernels++
			if a.spills+b.spills > 0 {
				spilling++
			}
		}
	}
	fmt.Printf("\n%d kernels, %d of which spill. Figures are for %s / %s.\n", kernels, spilling, archs[0], archs[1])
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "resources:", err)
		os.Exit(1)
	}
}
