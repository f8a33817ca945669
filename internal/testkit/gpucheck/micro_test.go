//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// oneKernel is a double on which every kernel is the one that does nothing.
type oneKernel struct{ *drivertest.Driver }

func (o oneKernel) Function(m driver.Module, _ string) (driver.Function, error) {
	return o.Driver.Function(m, "any")
}

// distinct gives each kernel a handle of its own, though one double runs for all.
type distinct struct {
	oneKernel
	real []driver.Function
}

func (d *distinct) Function(m driver.Module, name string) (driver.Function, error) {
	f, err := d.oneKernel.Function(m, name)
	d.real = append(d.real, f)
	return driver.Function(len(d.real)), err
}

func (d *distinct) AllowShared(f driver.Function, n int) error {
	return d.oneKernel.AllowShared(d.real[f-1], n)
}

func (d *distinct) Launch(f driver.Function, grid, block driver.Dim, shared int, s driver.Stream, params unsafe.Pointer, size uintptr) error {
	return d.oneKernel.Launch(d.real[f-1], grid, block, shared, s, params, size)
}

// Every kind of a training step is timed at its shapes, and gives its memory back.
func TestMicrobenchmarks(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler")
	}
	lib := t.TempDir() + "/any.so"
	cmd := exec.Command(cc, "-shared", "-fPIC", "-x", "c", "-o", lib, "-")
	cmd.Stdin = strings.NewReader("int shim_any() { return 0; }\n")
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", text)
	p := pool.New(1)
	defer p.Close()
	testBreakdown(t, lib, p)
	for _, prec := range []string{"fp32", "bf16"} {
		d := drivertest.New(drivertest.Options{})
		c := contacts{api: oneKernel{d}, edge: 16, tell: func(told) {},
			compiler: func() (kernelscuda.Compiler, error) { return loaded{lib}, nil },
			products: func() (blas.Library, error) { return blastest.New(d), nil }}
		var out bytes.Buffer
		require.NoError(t, microChild(&out, c, cpu.New(p), "tiny", prec))
		require.NoError(t, d.Close())
		kinds := map[string]bool{}
		var rows []microRow
		for line := range bytes.Lines(out.Bytes()) {
			var r microRow
			require.NoError(t, json.Unmarshal(line, &r))
			require.Empty(t, r.Error, r.Op)
			require.Positive(t, r.Micros, r.Op)
			kinds[strings.Fields(r.Op)[0]] = true
			kinds["both"] = kinds["both"] || strings.Contains(r.Op, ", layernorm ")
			rows = append(rows, r)
		}
		for _, kind := range []string{"linear", "attention", "attention_grad", "layernorm", "both", "adamw", "head_loss_grad"} {
			require.True(t, kinds[kind], "%s of %v", kind, kinds)
		}
		var beside []string
		for _, r := range rows {
			if r.Apart > 0 {
				require.False(t, r.ByKernels, r.Op)
				beside = append(beside, strings.Fields(r.Op)[0])
			}
		}
		if prec == "fp32" {
			require.Empty(t, beside)
		} else {
			for kind := range apart {
				require.Contains(t, beside, string(kind))
			}
			table := microTable(rows)
			require.Contains(t, table[len(table)-1][2], "in the product's epilogue")
		}
		table := microTable(append(rows, microRow{Op: "a product", Each: []float64{5, 4}}))
		require.True(t, slices.ContainsFunc(table, func(row []string) bool { return strings.Contains(row[2], "algorithm 2 of 2 is faster") }))
	}
	_, err = microPlan("huge", "fp32", 2, 0)
	require.ErrorContains(t, err, "huge")
}

// A breakdown has every kernel of a step by its name, and all launches of the whole model.
func testBreakdown(t *testing.T, lib string, p *pool.Pool) {
	d := drivertest.New(drivertest.Options{})
	c := contacts{api: &distinct{oneKernel: oneKernel{d}}, tell: func(told) {},
		compiler: func() (kernelscuda.Compiler, error) { return loaded{lib}, nil },
		products: func() (blas.Library, error) { return blastest.New(d), nil }}
	var out bytes.Buffer
	require.NoError(t, breakdownChild(&out, c, cpu.New(p), "tiny", "bf16"))
	require.NoError(t, d.Close(), "all events are given back")
	launches := map[string]int{}
	for line := range bytes.Lines(out.Bytes()) {
		var k kernelRow
		require.NoError(t, json.Unmarshal(line, &k))
		require.Empty(t, k.Error, k.Kernel)
		launches[k.Kernel] = k.Launches
	}
	layers := microShapes["tiny"].layers
	require.Equal(t, layers, launches["attention_bf16"], "%v", launches)
	require.Equal(t, 2*layers+1, launches["norm_grad_bf16"])
	require.Equal(t, 2*layers, launches["add_layernorm_bf16"])
	require.Equal(t, layers+3, launches["adamw"])
	products := 0
	for name, n := range launches {
		if strings.HasPrefix(name, "cuBLASLt ") {
			products += n
		}
	}
	require.GreaterOrEqual(t, products, 12*layers)
}
