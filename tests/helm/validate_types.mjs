// Reads a JSON list of objects and prints what is wrong with each by the types of KEDA and the Prometheus operator.
import { readFileSync } from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
import { PrometheusRule } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule";
import { ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor";

const types = { ScaledObject, PrometheusRule, ServiceMonitor };
let wrong = 0;
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    new types[object.kind](object).validate();
  } catch (error) {
    wrong += 1;
    console.log(`${object.kind} ${object.metadata.name}: ${error.message}`);
  }
}
process.exit(wrong ? 1 : 0);
