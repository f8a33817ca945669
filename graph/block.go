package graph

import (
	"strconv"
	"strings"
)

// Block is what repeats in a model: the layers of a transformer are blocks of one
// template, alike in everything but their index. Units, and through their unit
// operations and buffers, belong to a block. A partly frozen block has two units
// after sharding, which are gathered together.
//
// The zero Block is none. Index −1 is a block that stands alone, as the embedding.
type Block struct {
	Template string // "h", "layer"
	Index    int    // from 0
}

// Repeats says whether the block is one of several that are alike.
func (b Block) Repeats() bool { return b.Template != "" && b.Index >= 0 }

// Cut returns what stands before and after the block's index in the name of one
// of its buffers, operations or parameters: "h.3.mlp.act" of block 3 is "h." and
// ".mlp.act". ok is false where the name has no such number between dots, or the
// block does not repeat.
func (b Block) Cut(name string) (before, after string, ok bool) {
	if !b.Repeats() {
		return "", "", false
	}
	number := "." + strconv.Itoa(b.Index) + "."
	i := strings.Index(name, number)
	if i < 0 {
		return "", "", false
	}
	return name[:i+1], name[i+len(number)-1:], true
}

// BlockOf returns the block of a unit; none for −1.
func (p *Program) BlockOf(unit int) Block {
	if unit < 0 || unit >= len(p.Units) {
		return Block{}
	}
	return p.Units[unit].Block
}

// SameBlock says whether two units belong together.
func (p *Program) SameBlock(u, v int) bool {
	return u == v || p.BlockOf(u) != (Block{}) && p.BlockOf(u) == p.BlockOf(v)
}
