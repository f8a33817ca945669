package graph

import (
	"strconv"
	"strings"
)

// Block identifies one repeated part of a model. The layers of a transformer are blocks of one
// template and differ only in their index. A Unit belongs to a block, and operations and buffers
// belong to the block of their unit. A partly frozen block has two units after sharding, which are
// gathered together.
//
// The zero Block means no block. Index −1 is a block that does not repeat, such as the embedding.
type Block struct {
	Template string // "h", "layer"
	Index    int    // from 0
}

// Repeats says whether the block is one of several layers of the same template.
func (b Block) Repeats() bool { return b.Template != "" && b.Index >= 0 }

// Cut splits the name of one of the block's buffers, operations or parameters around the
// block's index: for block 3, "h.3.mlp.act" gives "h." and ".mlp.act". ok is false if the
// name does not contain the index between dots, or if the block does not repeat.
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
