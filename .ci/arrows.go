//go:build ignore

// Command arrows counts the references between the files of a package that point upwards.
//
//	go run .ci/arrows.go [-v] PACKAGES
//
// An arrow is a pair of files of which the first uses a function, type, variable, constant or
// method that the second declares. The files are put into the order that has the fewest upward
// arrows, as far as a search from many starts finds it; -v prints that order and these arrows.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// listed is a package as go list describes it.
type listed struct {
	Dir, ImportPath, Export string
	GoFiles                 []string
	DepOnly                 bool
}

// uses are the names that each file uses of each other file, by the files' indices.
type uses [][]map[string]bool

func main() {
	verbose := flag.Bool("v", false, "print the order of the files and the upward arrows")
	flag.Parse()
	if err := run(flag.Args(), *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "arrows:", err)
		os.Exit(1)
	}
}

func run(patterns []string, verbose bool) error {
	list := exec.Command("go", append([]string{"list", "-export", "-deps", "-json=Dir,ImportPath,Export,GoFiles,DepOnly"}, patterns...)...)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return err
	}
	exports := map[string]string{}
	var packages []listed
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		exports[p.ImportPath] = p.Export
		if !p.DepOnly {
			packages = append(packages, p)
		}
	}
	for _, p := range packages {
		lines, u, err := read(p, exports)
		if err != nil {
			return fmt.Errorf("%s: %w", p.ImportPath, err)
		}
		order, upward := best(u)
		arrows := 0
		for _, row := range u {
			for _, names := range row {
				arrows += one(names)
			}
		}
		fmt.Printf("%-64s %5d lines %3d files %4d arrows %3d upward\n", p.ImportPath, lines, len(u), arrows, upward)
		if verbose {
			print(p.GoFiles, u, order)
		}
	}
	return nil
}

// read type-checks a package.
func read(p listed, exports map[string]string) (lines int, u uses, err error) {
	fset := token.NewFileSet()
	var files []*ast.File
	index := map[string]int{}
	for i, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, 0)
		if err != nil {
			return 0, nil, err
		}
		files, index[fset.File(f.Pos()).Name()] = append(files, f), i
		lines += fset.File(f.Pos()).LineCount()
		u = append(u, make([]map[string]bool, len(p.GoFiles)))
	}
	open := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	// Functions that cgo or assembly declare are unknown here; the rest is checked all the same.
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", open), Error: func(error) {}}
	pkg, _ := config.Check(p.ImportPath, fset, files, info)
	for id, o := range info.Uses {
		name, ok := declared(pkg, o)
		from, to := index[fset.File(id.Pos()).Name()], -1
		if ok {
			to = index[fset.File(o.Pos()).Name()]
		}
		if to < 0 || to == from {
			continue
		}
		if u[from][to] == nil {
			u[from][to] = map[string]bool{}
		}
		u[from][to][name] = true
	}
	return lines, u, nil
}

// declared reports whether an object is a declaration of the package, or a method of one.
func declared(pkg *types.Package, o types.Object) (name string, ok bool) {
	if o.Pkg() != pkg {
		return "", false
	}
	if f, ok := o.(*types.Func); ok {
		if r := f.Signature().Recv(); r != nil {
			name := types.TypeString(r.Type(), func(*types.Package) string { return "" })
			return name + "." + o.Name(), !types.IsInterface(r.Type())
		}
	}
	return o.Name(), o.Parent() == pkg.Scope()
}

// starts is the number of random orders that the search improves.
const starts = 300

// best is the order of files, the highest first, with the fewest arrows upwards that it finds:
// it moves single files while that helps.
func best(u uses) (order []int, upward int) {
	upward = len(u) * len(u)
	for seed := range uint64(starts) {
		o := rand.New(rand.NewPCG(seed, 0)).Perm(len(u))
		for improve(o, u) {
		}
		n := 0
		for i := range o {
			for j := range i {
				n += one(u[o[i]][o[j]])
			}
		}
		if n < upward {
			order, upward = o, n
		}
	}
	return order, upward
}

// improve moves each file to its best place among the others.
func improve(o []int, u uses) (better bool) {
	for i, f := range slices.Clone(o) {
		i = slices.Index(o, f)
		gain, to := 0, i
		for k, d := i-1, 0; k >= 0; k-- {
			if d += one(u[o[k]][f]) - one(u[f][o[k]]); d < gain {
				gain, to = d, k
			}
		}
		for k, d := i+1, 0; k < len(o); k++ {
			if d += one(u[f][o[k]]) - one(u[o[k]][f]); d < gain {
				gain, to = d, k
			}
		}
		if to != i {
			copy(o, slices.Insert(slices.Delete(slices.Clone(o), i, i+1), to, f))
			better = true
		}
	}
	return better
}

func one(names map[string]bool) int {
	if len(names) == 0 {
		return 0
	}
	return 1
}

func print(files []string, u uses, order []int) {
	for i, f := range order {
		fmt.Println("  ", files[f])
		for _, above := range order[:i] {
			if names := u[f][above]; len(names) > 0 {
				fmt.Printf("      up to %s: %s\n", files[above], strings.Join(slices.Sorted(maps.Keys(names)), " "))
			}
		}
	}
}
