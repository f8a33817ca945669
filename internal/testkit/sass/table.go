package sass

import (
	_ "embed"
	"fmt"
	"strconv"
	"strings"
)

//go:embed machine-code.txt
var recorded string

// Recorded returns the recorded table of all kernels, as compiled from the sources.
func Recorded() (*Table, error) { return ReadTable(recorded) }

// Row holds the counts of a kernel for an architecture.
type Row struct {
	Arch, Source, Kernel string
	Code
}

// Table holds the kernels of all sources, for each architecture.
type Table struct {
	NVRTC string // version of the compiler
	Rows  []Row
}

const tableHead = `# What the assembler made of the GPU's kernels. Counts of instructions where they
# stand; a column is explained at sass.Code. Made again by
#	go test -run MachineCode ./internal/testkit/sass -update
# NVRTC `

func (c *Code) columns() (names []string, at []*int) {
	for _, f := range []struct {
		name string
		at   *int
	}{
		{"reg", &c.Registers}, {"stack", &c.Stack}, {"shared", &c.Shared}, {"instr", &c.Total},
		{"ld16", &c.Load16}, {"ld8", &c.Load8}, {"ld4", &c.Load4}, {"st16", &c.Store16}, {"st8", &c.Store8}, {"st4", &c.Store4},
		{"local", &c.Local}, {"async", &c.Async}, {"lds", &c.SharedLoad}, {"sts", &c.SharedStore}, {"tensor", &c.Tensor},
		{"float", &c.Float}, {"double", &c.Double}, {"mufu", &c.Special}, {"div64", &c.Divide64},
	} {
		names, at = append(names, f.name), append(at, f.at)
	}
	return names, at
}

// String returns the table in the format of its file.
func (t *Table) String() string {
	var b strings.Builder
	b.WriteString(tableHead + t.NVRTC + "\n")
	names, _ := new(Code).columns()
	line := func(arch, source, kernel string, cells []string) {
		fmt.Fprintf(&b, "%-5s %-19s %-30s", arch, source, kernel)
		for _, c := range cells {
			fmt.Fprintf(&b, " %6s", c)
		}
		b.WriteByte('\n')
	}
	line("arch", "source", "kernel", names)
	for _, r := range t.Rows {
		_, at := r.columns()
		var cells []string
		for _, v := range at {
			cells = append(cells, strconv.Itoa(*v))
		}
		line(r.Arch, r.Source, r.Kernel, cells)
	}
	return b.String()
}

// ReadTable parses the format that String writes.
func ReadTable(text string) (*Table, error) {
	rest, ok := strings.CutPrefix(text, tableHead)
	if !ok {
		return nil, fmt.Errorf("sass: the table does not start with %q", tableHead[:40])
	}
	lines := strings.Split(strings.TrimSuffix(rest, "\n"), "\n")
	t := &Table{NVRTC: lines[0]}
	for i, line := range lines[1:] {
		cells := strings.Fields(line)
		if i == 0 {
			continue // names of the columns
		}
		var r Row
		_, at := r.columns()
		if len(cells) != 3+len(at) {
			return nil, fmt.Errorf("sass: row %q has %d cells, want %d", line, len(cells), 3+len(at))
		}
		r.Arch, r.Source, r.Kernel = cells[0], cells[1], cells[2]
		for k, p := range at {
			n, err := strconv.Atoi(cells[3+k])
			if err != nil {
				return nil, fmt.Errorf("sass: row %q: %w", line, err)
			}
			*p = n
		}
		t.Rows = append(t.Rows, r)
	}
	return t, nil
}

// Find returns a kernel's row.
func (t *Table) Find(arch, kernel string) (Row, bool) {
	for _, r := range t.Rows {
		if r.Arch == arch && r.Kernel == kernel {
			return r, true
		}
	}
	return Row{}, false
}
