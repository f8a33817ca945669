// Package sass counts properties of the GPU kernels' machine code: registers, local memory, widths
// of memory accesses and tensor-core instructions. It parses the output of NVIDIA's disassembler,
// nvdisasm, and needs no GPU.
//
// machine-code.txt holds the counts of all kernels. A test compares it with the sources and checks
// rules; benchmarks/cuda/resources makes a page from it.
package sass

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Code holds the counts of a kernel's machine code. Instructions are counted once, not as often as
// they run.
type Code struct {
	Registers int // per thread
	Stack     int // bytes of local memory per thread, including functions
	Shared    int // static shared memory per block, bytes
	Total     int // instructions, without padding

	Load16, Load8, Load4    int // loads of global memory: 16 bytes, 8 bytes, less
	Store16, Store8, Store4 int // stores of global memory
	Local                   int // loads and stores of local memory
	Async                   int // copies from global to shared memory of 16 bytes
	SharedLoad, SharedStore int // any width; SharedLoad includes LDSM
	Tensor                  int // tensor-core products
	Float, Double           int // adds, multiplies and fused multiply-adds in fp32 and fp64
	Special                 int // instructions of the special function unit
	Divide64                int // calls of a routine that divides 64-bit integers
}

// Disassembler is the program that Disassemble starts.
type Disassembler struct{ path string }

// ErrNoDisassembler is returned if nvdisasm is not found.
var ErrNoDisassembler = errors.New("sass: nvdisasm (of NVIDIA's CUDA toolkit) was not found: looked in $SPILLWAY_NVDISASM, $PATH and /usr/local/cuda/bin")

// Find looks for nvdisasm.
func Find() (*Disassembler, error) {
	if path := os.Getenv("SPILLWAY_NVDISASM"); path != "" {
		return &Disassembler{path}, nil
	}
	for _, name := range []string{"nvdisasm", "/usr/local/cuda/bin/nvdisasm"} {
		if path, err := exec.LookPath(name); err == nil {
			return &Disassembler{path}, nil
		}
	}
	return nil, ErrNoDisassembler
}

// Disassemble returns the counts of a cubin's kernels, by name.
func (d *Disassembler) Disassemble(cubin []byte) (map[string]Code, error) {
	dir, err := os.MkdirTemp("", "spillway-sass-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "kernels.cubin")
	if err := os.WriteFile(file, cubin, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.Command(d.path, "-ndf", file)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("sass: %s: %w: %.400s", d.path, err, log.String())
	}
	return Parse(&out)
}

var (
	section     = regexp.MustCompile(`^\t\.section\t\.(text|nv\.shared)\.(\w+),`)
	attribute   = regexp.MustCompile(`^\t//----- nvinfo : (EIATTR_\w+)`)
	ofSymbol    = regexp.MustCompile(`\.word\tindex@\(([\w$]+)\)`)
	word        = regexp.MustCompile(`\.word\t0x([0-9a-f]+)`)
	zeros       = regexp.MustCompile(`^\t\.zero\t\t(\d+)`)
	helper      = regexp.MustCompile(`^(\$__internal_\w+\$\w+):`)
	instruction = regexp.MustCompile(`^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P[0-9T]+ +)?([A-Z][A-Z0-9_.]*)([^;]*);`)
	divides     = regexp.MustCompile(`__cuda_sm\d+_(div|rem)_[su]64`)
)

// Parse parses the output of `nvdisasm -ndf`.
func Parse(r *bytes.Buffer) (map[string]Code, error) {
	p := parser{kernels: map[string]*Code{}, frames: map[string]int{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if err := p.line(lines.Text()); err != nil {
			return nil, fmt.Errorf("sass: nvdisasm's %q: %w", lines.Text(), err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("sass: %w", err)
	}
	if len(p.kernels) == 0 {
		return nil, errors.New("sass: nvdisasm printed no kernel")
	}
	kernels := map[string]Code{}
	for name, c := range p.kernels {
		kernels[name] = *c
	}
	return kernels, nil
}

type parser struct {
	kernels           map[string]*Code
	frames            map[string]int // bytes of local memory of 12.4's functions of kernels, by symbol
	kind, name        string         // of the section
	attribute, symbol string         // of an entry of .nv.info
}

func (p *parser) of(name string) *Code {
	if p.kernels[name] == nil {
		p.kernels[name] = &Code{}
	}
	return p.kernels[name]
}

func (p *parser) line(s string) error {
	if m := section.FindStringSubmatch(s); m != nil {
		p.kind, p.name = m[1], m[2]
		p.of(p.name)
		return nil
	}
	if strings.HasPrefix(s, "\t.section\t") {
		p.kind, p.name = "", ""
		return nil
	}
	if m := attribute.FindStringSubmatch(s); m != nil {
		p.attribute, p.symbol = m[1], ""
		return nil
	}
	switch p.kind {
	case "nv.shared":
		if m := zeros.FindStringSubmatch(s); m != nil {
			n, err := strconv.Atoi(m[1])
			p.of(p.name).Shared += n
			return err
		}
	case "text":
		if m := helper.FindStringSubmatch(s); m != nil {
			p.of(p.name).Stack += p.frames[m[1]]
		} else if m := instruction.FindStringSubmatch(s); m != nil {
			p.of(p.name).count(m[1], m[2])
		}
	default:
		return p.info(s)
	}
	return nil
}

// info reads registers and stack from the attributes. Version 11.8 names a kernel's function
// $kernel$function. Version 12.4 names it $__internal_N$function, and the kernel is known from the
// place of the code.
func (p *parser) info(s string) error {
	if m := ofSymbol.FindStringSubmatch(s); m != nil {
		p.symbol = m[1]
		return nil
	}
	m := word.FindStringSubmatch(s)
	if m == nil || p.symbol == "" {
		return nil
	}
	n, err := strconv.ParseUint(m[1], 16, 32)
	kernel := p.symbol
	if parts := strings.Split(kernel, "$"); len(parts) == 3 && parts[0] == "" && !strings.HasPrefix(parts[1], "__internal") {
		kernel = parts[1]
	}
	p.symbol = ""
	switch p.attribute {
	case "EIATTR_REGCOUNT":
		if !strings.HasPrefix(kernel, "$") {
			p.of(kernel).Registers = int(n)
		}
	case "EIATTR_FRAME_SIZE":
		if strings.HasPrefix(kernel, "$") {
			p.frames[kernel] = int(n)
		} else {
			p.of(kernel).Stack += int(n)
		}
	}
	return err
}

// count adds an instruction. The suffixes 128 and 64 give its width; 32 bits and less have other
// suffixes or none.
func (c *Code) count(op, operands string) {
	name, suffix, _ := strings.Cut(op, ".")
	if name == "NOP" {
		return
	}
	c.Total++
	wide := func(n16, n8, n4 *int) {
		switch {
		case strings.Contains(suffix, "128"):
			*n16++
		case strings.HasSuffix(suffix, ".64") || strings.Contains(suffix, ".64."):
			*n8++
		default:
			*n4++
		}
	}
	switch name {
	case "LDG", "LD":
		wide(&c.Load16, &c.Load8, &c.Load4)
	case "STG", "ST":
		wide(&c.Store16, &c.Store8, &c.Store4)
	case "LDL", "STL":
		c.Local++
	case "LDGSTS":
		c.Async++
	case "LDS", "LDSM":
		c.SharedLoad++
	case "STS":
		c.SharedStore++
	case "HMMA", "HGMMA":
		c.Tensor++
	case "FADD", "FMUL", "FFMA":
		c.Float++
	case "DADD", "DMUL", "DFMA":
		c.Double++
	case "MUFU":
		c.Special++
	case "CALL":
		if divides.MatchString(operands) {
			c.Divide64++
		}
	}
}
