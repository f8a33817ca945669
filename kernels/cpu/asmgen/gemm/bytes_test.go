package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestEncodings assembles every form with GNU as and compares the bytes.
func TestEncodings(t *testing.T) {
	as, err := exec.LookPath("as")
	if err != nil {
		t.Skip("GNU as is not installed")
	}
	var source strings.Builder
	var want []byte
	add := func(code []byte, format string, args ...any) {
		fmt.Fprintf(&source, format+"\n", args...)
		want = append(want, code...)
	}
	gp := []string{"rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"}
	for i := range 32 * 32 {
		a, b, c := i%32, i/32, (i*7+i/32)%32
		add(evexDPBF16(a, b, c), "vdpbf16ps %%zmm%d, %%zmm%d, %%zmm%d", c, b, a)
	}
	for i := range 8 * 8 {
		// The three tiles of a product differ.
		a, b, c := i%8, (i%8+1+i/8%7)%8, 0
		for c == a || c == b {
			c++
		}
		add(dpTiles(tdpbf16ps, a, b, c), "tdpbf16ps %%tmm%d, %%tmm%d, %%tmm%d", c, b, a)
		add(dpTiles(tdpbssd, a, b, c), "tdpbssd %%tmm%d, %%tmm%d, %%tmm%d", c, b, a)
		add(dpTiles(tdpbusd, a, b, c), "tdpbusd %%tmm%d, %%tmm%d, %%tmm%d", c, b, a)
		add(tileZero(a), "tilezero %%tmm%d", a)
	}
	for base := range gp {
		for index := range gp {
			if index == 4 {
				continue
			}
			tile, disp := (base+index)%8, 0x1000+base*64
			add(tileLoad(tile, base, index, disp), "tileloadd %d(%%%s,%%%s,1), %%tmm%d", disp, gp[base], gp[index], tile)
			add(tileLoadT1(tile, base, index, disp), "tileloaddt1 %d(%%%s,%%%s,1), %%tmm%d", disp, gp[base], gp[index], tile)
			add(tileStore(tile, base, index, disp), "tilestored %%tmm%d, %d(%%%s,%%%s,1)", tile, disp, gp[base], gp[index])
		}
		if base&7 != 4 {
			add(loadConfig(base, 0x1000), "ldtilecfg 4096(%%%s)", gp[base])
		}
	}
	add(tileRelease(), "tilerelease")
	dir := t.TempDir()
	object, binary := filepath.Join(dir, "x.o"), filepath.Join(dir, "x.bin")
	cmd := exec.Command(as, "-o", object, "-")
	cmd.Stdin = strings.NewReader(source.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("as: %v\n%.2000s", err, out)
	}
	if out, err := exec.Command("objcopy", "-O", "binary", "-j", ".text", object, binary).CombinedOutput(); err != nil {
		t.Fatalf("objcopy: %v\n%s", err, out)
	}
	got, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		n := min(len(got), len(want))
		for i := range n {
			if got[i] != want[i] {
				t.Fatalf("byte %d of %d: as wrote % x, we % x", i, n, got[max(i-8, 0):min(i+12, len(got))], want[max(i-8, 0):min(i+12, len(want))])
			}
		}
		t.Fatalf("as wrote %d bytes, we %d", len(got), len(want))
	}
}
