"""One operation per file: public function, `_reference` twin, Triton kernel, launch. Imports no stage."""
