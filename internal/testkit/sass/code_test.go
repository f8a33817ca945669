package sass_test

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/internal/testkit/sass"
	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

var update = flag.Bool("update", false, "write machine-code.txt")

// architectures that are held.
var architectures = []driver.Device{{Major: 8}, {Major: 9}}

// compiled is the table of the sources as the NVRTC of this machine compiles them.
func compiled(t *testing.T) *sass.Table {
	c, err := nvrtc.Open(nvrtc.Options{})
	var missing *dynlib.NotFound
	if errors.As(err, &missing) {
		t.Skipf("the kernels' machine code is not looked at: %v", err)
	}
	require.NoError(t, err)
	d, err := sass.Find()
	if err != nil {
		t.Skipf("the kernels' machine code is not looked at: %v", err)
	}
	type job struct {
		dev    driver.Device
		source string
		rows   []sass.Row
		err    error
	}
	var jobs []*job
	for _, dev := range architectures {
		for _, name := range cuda.Sources() {
			jobs = append(jobs, &job{dev: dev, source: name})
		}
	}
	look := func(j *job) error {
		source, err := cuda.Source(j.source)
		if err != nil {
			return err
		}
		image, err := c.Compile(j.source, source, j.dev)
		if err != nil {
			return err
		}
		kernels, err := d.Disassemble(image)
		for _, k := range slices.SortedFunc(maps.Keys(kernels), cmp.Compare) {
			j.rows = append(j.rows, sass.Row{Arch: fmt.Sprintf("sm_%d%d", j.dev.Major, j.dev.Minor), Source: j.source, Kernel: k, Code: kernels[k]})
		}
		return err
	}
	todo := make(chan *job)
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for j := range todo {
				j.err = look(j)
			}
		})
	}
	for _, j := range jobs {
		todo <- j
	}
	close(todo)
	workers.Wait()
	table := &sass.Table{NVRTC: c.Version()}
	for _, j := range jobs {
		require.NoError(t, j.err, j.source)
		table.Rows = append(table.Rows, j.rows...)
	}
	return table
}

// TestMachineCode compiles and disassembles every kernel: the rules hold, and by the
// compiler that the table was made with, every number is the table's.
func TestMachineCode(t *testing.T) {
	got := compiled(t)
	if *update {
		require.NoError(t, os.WriteFile("machine-code.txt", []byte(got.String()), 0o644))
	}
	requireRules(t, got)
	want, err := sass.Recorded()
	require.NoError(t, err)
	if got.NVRTC != want.NVRTC || *update {
		t.Logf("NVRTC %s: the table is of %s, whose numbers are not compared", got.NVRTC, want.NVRTC)
		return
	}
	is, was := strings.Split(got.String(), "\n"), strings.Split(want.String(), "\n")
	for i := range min(len(is), len(was)) {
		require.Equal(t, was[i], is[i], "machine-code.txt, line %d, is not what the sources compile to; -update writes it anew", i+1)
	}
	require.Len(t, is, len(was))
}

// TestRecordedCode holds the recorded table to the rules, which needs no tools.
func TestRecordedCode(t *testing.T) {
	table, err := sass.Recorded()
	require.NoError(t, err)
	requireRules(t, table)
	for _, a := range architectures {
		for _, source := range cuda.Sources() {
			require.True(t, slices.ContainsFunc(table.Rows, func(r sass.Row) bool {
				return r.Source == source && r.Arch == fmt.Sprintf("sm_%d%d", a.Major, a.Minor)
			}), "%s has no kernel for %d.%d", source, a.Major, a.Minor)
		}
	}
	again, err := sass.ReadTable(table.String())
	require.NoError(t, err)
	require.Equal(t, table, again)
}

// requireRules holds every kernel to every rule; an exception that no kernel needs is
// wrong too.
func requireRules(t *testing.T, table *sass.Table) {
	for _, rule := range rules {
		needed := map[string]bool{}
		for _, r := range table.Rows {
			if rule.holds(&r) {
				continue
			}
			require.Contains(t, rule.except, family(r.Kernel), "%s of %s for %s breaks the rule %q: %+v", r.Kernel, r.Source, r.Arch, rule.name, r.Code)
			needed[family(r.Kernel)] = true
		}
		for f := range rule.except {
			require.True(t, needed[f], "every %s keeps the rule %q: strike the exception", f, rule.name)
		}
	}
}

// As nvdisasm 11.8 prints it.
const printed = `	.section	.nv.info,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_REGCOUNT
        /*0004*/ 	.word	index@(one)
        /*0008*/ 	.word	0x00000020
	//----- nvinfo : EIATTR_FRAME_SIZE
        /*0028*/ 	.word	index@($one$helper)
        /*002c*/ 	.word	0x00000240
	//----- nvinfo : EIATTR_FRAME_SIZE
        /*0038*/ 	.word	index@($__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath)
        /*003c*/ 	.word	0x00000008
	.section	.text.one,"ax",@progbits
	.sectionflags	@"SHF_BARRIERS=1"
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0080*/              @!P1 LDG.E.128 R4, [R2.64] ;
        /*0090*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*00a0*/                   LDG.E.U16 R3, [R10.64] ;
        /*00b0*/               @P0 STG.E.64 [R10.64], R2 ;
        /*00c0*/                   STG.E.64.STRONG.GPU [R10.64], R2 ;
        /*00d0*/                   STL [R1], R2 ;
        /*00e0*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00f0*/                   CALL.REL.NOINC ` + "`" + `($one$__cuda_sm20_div_s64) ;
        /*0100*/                   CALL.REL.NOINC ` + "`" + `($one$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;
        /*0110*/                   LDGSTS.E.BYPASS.128 [R3], [R2.64] ;
        /*0120*/                   FFMA R0, R1, R2, R3 ;
        /*0130*/                   NOP;
$__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath:
	.section	.nv.shared.one,"aw",@nobits
	.zero		1152
	.section	.nv.constant0.one,"a",@progbits
	.zero		596
`

func TestParse(t *testing.T) {
	got, err := sass.Parse(bytes.NewBufferString(printed))
	require.NoError(t, err)
	require.Equal(t, map[string]sass.Code{"one": {
		Registers: 32, Stack: 584, Shared: 1152, Total: 12, Load16: 2, Load4: 1, Store8: 2, Local: 1, Tensor: 1, Divide64: 1, Async: 1, Float: 1,
	}}, got)
	_, err = sass.Parse(bytes.NewBufferString("nothing\n"))
	require.ErrorContains(t, err, "no kernel")
}

func TestTableSaysWhatIsWrong(t *testing.T) {
	_, err := sass.ReadTable("something")
	require.ErrorContains(t, err, "does not start with")
	good := (&sass.Table{NVRTC: "1.2", Rows: []sass.Row{{Arch: "sm_80", Source: "a.cu", Kernel: "k"}}}).String()
	_, err = sass.ReadTable(good + "sm_80 a.cu k 1\n")
	require.ErrorContains(t, err, "has 4 cells")
	_, err = sass.ReadTable(strings.Replace(good, "     0\n", "     x\n", 1))
	require.ErrorContains(t, err, "invalid syntax")
}
