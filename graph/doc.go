// Package graph represents the step program: typed buffers, operations with declared effects,
// streams and events. A model is built as a forward program and differentiated into forward and
// backward. The packages above (zero, fsdp, recompute, offload, precision) then rewrite it. The
// package is pure: it touches no device, file or network, and imports the standard library only.
//
// Its files, from those without dependencies on others to those that use the most:
//
//   - program: types, kinds (with the attributes), port, buffer, op, param, unit, section, program;
//   - parts of a kind's description: target, operand, checker, info (an entry of the kind table),
//     operation (an operation made by Define), call (a kernel's arguments);
//   - the kind table: info_elem, info_linear and the other info_ files have the entries, info_table
//     has the table; with it check, cost and workspace treat all operations alike, and define adds
//     operations that are not in it;
//   - differentiation: diff, with differ, diff_gradients and derivatives;
//   - the order of execution: region, order, sync, schedule;
//   - the rest builds, rewrites, prints or verifies programs: builder, edit, merge, fuse, role,
//     text, verify.
package graph
