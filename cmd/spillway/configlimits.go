package main

import (
	"bytes"
	"fmt"
)

// Limits of a configuration file. The parser's time and memory grow with the square
// of the depth: they are checked before it sees the text.
const (
	maxConfig      = 1 << 20 // bytes
	maxConfigDepth = 100
)

// shallow refuses text whose brackets, indents or list marks nest deeper than any
// configuration does. It knows no quotes: brackets in a value count too.
func shallow(text []byte) error {
	depth := 0
	for i, line := range bytes.Split(text, []byte("\n")) {
		deep := len(line) - len(bytes.TrimLeft(line, " \t-?"))
		for _, c := range line {
			switch c {
			case '[', '{':
				depth++
				deep = max(deep, depth)
			case ']', '}':
				depth = max(0, depth-1)
			}
		}
		if deep > maxConfigDepth {
			return fmt.Errorf("line %d nests deeper than %d levels", i+1, maxConfigDepth)
		}
	}
	return nil
}
