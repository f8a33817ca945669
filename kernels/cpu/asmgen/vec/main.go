// Command vec generates the assembly of package kernels/cpu/vec, each kernel for
// AVX-512 and AVX2 from one description.
//
// Run it through go generate in that package; -set chooses a file's kernels.
package main

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/kernels/cpu/asmgen/vlib"
)

var sets = map[string]func(){
	"elementwise": elementwise,
	"rows":        rows,
	"columns":     columns,
	"optim":       optim,
	"sums":        sums,
	"convert":     convert,
	"dropout":     dropout,
	"quant8":      quant8,
	"int8":        int8s,
}

// entries are the fields of package vec's table, with the function's base name; alone
// has those of AVX-512 that AVX2 lacks.
var entries, alone = map[string]string{}, map[string]string{}

// kernel describes one function and its place in the table.
func kernel(field, name, signature, doc string, body func(g *vlib.Gen)) {
	entries[field] = name
	vlib.Both(name, signature, doc, body)
}

// kernel512 is kernel for a function of AVX-512 alone.
func kernel512(field, name, signature, doc string, body func(g *vlib.Gen)) {
	alone[field] = name
	vlib.AVX512(name, signature, doc, body)
}

func main() {
	set := flag.String("set", "", "kernels to generate")
	flag.Parse()
	gen, ok := sets[*set]
	if !ok {
		fmt.Fprintf(os.Stderr, "vec: no set %q\n", *set)
		os.Exit(1)
	}
	gen()
	vlib.Declare(table())
	vlib.Finish("vec")
}

// table is the function that enters the kernels in package vec's table.
func table() string {
	var b strings.Builder
	b.WriteString("func init() {\n")
	for _, l := range []string{"AVX512", "AVX2"} {
		fmt.Fprintf(&b, "\t{\n\t\tt := &tables[level.%s]\n\t\tt.on = true\n", l)
		of := maps.Clone(entries)
		if l == "AVX512" {
			maps.Copy(of, alone)
		}
		for _, f := range slices.Sorted(maps.Keys(of)) {
			fmt.Fprintf(&b, "\t\tt.%s = %s%s\n", f, of[f], l)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}
