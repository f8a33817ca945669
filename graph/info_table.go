package graph

import (
	"maps"
	"slices"
)

// kindTable has every kind of this package.
var kindTable = tableOf(elementKinds, linearKinds, normKinds, attentionKinds, movingKinds, convKinds, generateKinds, lossKinds, quantKinds, updateKinds)

func tableOf(lists ...[]*Info) map[Kind]*Info {
	table := map[Kind]*Info{}
	for _, list := range lists {
		for _, in := range list {
			table[in.Kind] = in
		}
	}
	return table
}

// InfoOf returns the kind's entry in the kind table.
func InfoOf(k Kind) (*Info, bool) {
	in, ok := kindTable[k]
	return in, ok
}

// Kinds returns every kind of the table, sorted by name.
func Kinds() []Kind {
	return slices.Sorted(maps.Keys(kindTable))
}

// Info returns the Info of the operation's definition or of its kind in the kind table.
func (op *Op) Info() (*Info, bool) {
	if op.Own != nil {
		return op.Own.info, op.Own.def.Kind == op.Kind
	}
	in, ok := kindTable[op.Kind]
	return in, ok
}
